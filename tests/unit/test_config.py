"""Settings: which source wins, and that everything wrong is named at once, where it was written."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from pydantic import ValidationError

from prefixcache.config import Settings, add_settings_arguments, load_settings
from prefixcache.errors import ConfigError


@pytest.fixture(autouse=True)
def empty_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)


def settings_for(*argv: str) -> Settings:
    parser = argparse.ArgumentParser()
    serve = parser.add_subparsers(dest="command").add_parser("serve")
    add_settings_arguments(serve)
    arguments, unknown = parser.parse_known_args(["serve", *argv])
    return load_settings(arguments, unknown)


def problems_of(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        settings_for(*argv)
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


def test_defaults_need_nothing_and_listen_on_this_machine_only() -> None:
    settings = settings_for()
    assert settings == Settings() == load_settings()
    assert (settings.host, settings.port) == ("127.0.0.1", 50051)
    assert (settings.metrics_host, settings.metrics_port) == ("127.0.0.1", 9464)
    assert settings.model is None
    assert settings.cache_dir == Path.home() / ".cache" / "prefixcache"


def test_flag_beats_variable_beats_file_beats_default(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("prefixcache.toml").write_text("max_num_seqs = 3\nmax_queue = 30\ngrace_s = 300\n")
    monkeypatch.setenv("PREFIXCACHE_MAX_NUM_SEQS", "2")
    monkeypatch.setenv("PREFIXCACHE_MAX_QUEUE", "20")
    settings = settings_for("--max-num-seqs", "1")
    assert (settings.max_num_seqs, settings.max_queue, settings.grace_s) == (1, 20, 300)
    assert settings.log_level == "info"


def test_the_file_can_be_chosen_by_flag_or_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("prefixcache.toml").write_text("port = 1")
    Path("two.toml").write_text("port = 2")
    Path("three.toml").write_text("port = 3")
    assert settings_for().port == 1
    monkeypatch.setenv("PREFIXCACHE_CONFIG", "two.toml")
    assert settings_for().port == 2
    assert settings_for("--config", "three.toml").port == 3


def test_an_empty_variable_counts_as_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFIXCACHE_MODEL", "")
    monkeypatch.setenv("PREFIXCACHE_PORT", "")
    assert settings_for() == Settings()


def test_every_setting_has_a_flag_with_a_description(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings_for("--help")
    text = capsys.readouterr().out
    for name, field in Settings.model_fields.items():
        assert f"--{name.replace('_', '-')} " in text
        assert field.description
    assert "--device {auto,cpu,cuda}" in text
    assert "Default: 64." in text


def test_everything_wrong_is_listed_at_once_where_it_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("prefixcache.toml").write_text('prot = 3\nlog_level = "loud"\n[server]\nhost = "x"\n')
    monkeypatch.setenv("PREFIXCACHE_CACH_MEMORY", "1GiB")
    monkeypatch.setenv("PREFIXCACHE_THREADS", "0")
    problems = problems_of("--port", "99999", "--metrics-prot", "5", "--grace-s=soon", "stray")
    assert len(problems) == 9
    for start, rest in [
        ("--metrics-prot: there is no such flag", "did you mean metrics_port?"),
        ("stray: nothing is expected here", ""),
        ("PREFIXCACHE_CACH_MEMORY: there is no such variable", "did you mean cache_memory?"),
        ("--port: ", "less than or equal to 65535 (not '99999')"),
        ("--grace-s: ", "valid number"),
        ("PREFIXCACHE_THREADS: ", "greater than 0"),
        ("prefixcache.toml: log_level: ", "(not 'loud')"),
        ("prefixcache.toml: server: there is no such setting", ""),
        ("prefixcache.toml: prot: there is no such setting", "did you mean port?"),
    ]:
        assert any(problem.startswith(start) and rest in problem for problem in problems), (start, problems)


def test_problems_show_no_password() -> None:
    url = "redis://user:s3cret@host:6379/0"
    for arguments in ([url], ["--rediss", url], [f"--rediss={url}"], ["--host-memory", url], [f"--port={url}"]):
        assert "s3cret" not in str(problems_of(*arguments)), arguments
    for line in (f'redis = ["{url}"]', f'rediss = "{url}"', f"redis = {url}"):
        Path("prefixcache.toml").write_text(line)
        assert "s3cret" not in str(problems_of()), line


def test_the_clients_key_in_the_environment_does_not_disturb_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFIXCACHE_API_KEY", "pfx_1")
    assert "pfx_1" not in str(settings_for())


def test_a_file_that_cannot_be_read_is_a_problem_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("prefixcache.toml").write_text("port = ")
    problems = problems_of("--port", "x")
    assert len(problems) == 2
    assert problems[0].startswith("prefixcache.toml: ")
    assert problems_of("--config", "missing.toml") == ["missing.toml: there is no such file"]
    Path("binary.toml").write_bytes(b"\xff\xfe")
    assert problems_of("--config", "binary.toml")[0].startswith("binary.toml: ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4GiB", 4 * 2**30),
        ("512 MB", 512_000_000),
        ("1073741824", 2**30),
        ("1.5GiB", 3 * 2**29),
        ("0.5", 0.5),
        (".25", 0.25),
        ("1.0", 1.0),
        ("50%", 0.5),
    ],
)
def test_cache_memory_is_bytes_or_a_fraction(text: str, expected: float) -> None:
    assert settings_for("--cache-memory", text).cache_memory == expected
    Path("prefixcache.toml").write_text(f'cache_memory = "{text}"')
    assert settings_for().cache_memory == expected


@pytest.mark.parametrize("text", ["0", "0.0", "1.5", "101%", "-1", "4 bananas", "", "nan", "%", "inf"])
def test_wrong_cache_memory(text: str) -> None:
    (problem,) = problems_of(f"--cache-memory={text}")
    assert problem.startswith("--cache-memory: ")


def test_toml_numbers_are_taken_as_they_are() -> None:
    Path("prefixcache.toml").write_text("cache_memory = 0.25\nmax_message_bytes = 1048576\n")
    settings = settings_for()
    assert (settings.cache_memory, settings.max_message_bytes) == (0.25, 2**20)


def test_memory_for_kv() -> None:
    assert Settings().cache_memory_bytes("cpu", 1000) == 400
    assert Settings().cache_memory_bytes("cuda", 1000) == 850
    assert Settings(cache_memory="0.1").cache_memory_bytes("cpu", 1000) == 100
    assert Settings(cache_memory="2KiB").cache_memory_bytes("cpu", 1000) == 2048


def test_tokens_per_step() -> None:
    assert Settings().batched_tokens("cpu") == 512
    assert Settings().batched_tokens("cuda") == 8192
    assert Settings(max_num_batched_tokens=7).batched_tokens("cuda") == 7


def test_both_ports_on_one_address_must_differ() -> None:
    assert problems_of("--port", "9464") == ["port and metrics_port are both 9464; they must differ"]
    assert settings_for("--port", "0", "--metrics-port", "0").port == 0
    assert settings_for("--port", "9464", "--metrics-host", "127.0.0.2").port == 9464


def test_the_cache_folder_follows_the_users_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/someone")
    assert Settings().cache_dir == Path("/var/cache/someone/prefixcache")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert Settings().cache_dir == Path.home() / ".cache" / "prefixcache"
    assert settings_for("--cache-dir", "~/models").cache_dir == Path.home() / "models"


def test_settings_never_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Settings().port = 1  # type: ignore[misc]


def test_flags_are_not_shortened() -> None:
    assert problems_of("--metrics-h", "x")[0].startswith("--metrics-h: there is no such flag")


def test_a_redis_password_from_a_file(tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text("s3cret\n")
    settings = settings_for("--redis", "redis://cache", "--redis-password-file", str(secret))
    assert settings.redis_password == "s3cret"
    assert "s3cret" not in repr(settings)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "the file cannot be read: No such file or directory"),
        ("\n", "the file is empty"),
    ],
)
def test_a_missing_password_is_found_at_start(tmp_path: Path, content: str | None, problem: str) -> None:
    secret = tmp_path / "password"
    if content is not None:
        secret.write_text(content)
    [line] = problems_of("--redis", "redis://cache", "--redis-password-file", str(secret))
    assert line.startswith(f"--redis-password-file: {problem}")


def test_a_password_for_no_redis_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("s3cret")
    [line] = problems_of("--redis-password-file", str(tmp_path / "password"))
    assert "redis_password_file is set, but redis" in line
