"""docker-compose.yml and its overlay, read by Docker Compose itself, which checks them against the compose schema."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from deploy.local.processes import free_port
from prefixcache.config import Settings
from tests.support.deployed_settings import settings_from
from tests.support.gateway import SMG
from tests.support.patience import until

ROOT = Path(__file__).parents[2]
BASE, GPU = "docker-compose.yml", "docker-compose.gpu.yml"
REPLICAS = ("replica-1", "replica-2")
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}


def compose(*files: str | Path, **variables: str) -> dict[str, Any]:
    """The whole configuration, as Docker Compose understands it."""
    done = run_compose(*files, **variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def run_compose(*files: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("docker-compose", path=Path(sys.executable).parent)
    assert program is not None
    chosen = [argument for file in files for argument in ("--file", str(file))]
    return subprocess.run(
        [program, "--project-directory", ROOT, *chosen, "--profile", "*", "config", "--format", "json"],
        cwd=ROOT,
        env=ENVIRONMENT | variables,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    return compose(BASE)["services"]


def test_a_wrong_key_is_refused(tmp_path: Path) -> None:
    """So the other tests' parser does check against the schema."""
    wrong = tmp_path / "wrong.yml"
    wrong.write_text((ROOT / BASE).read_text().replace("read_only: true", "readonly: true", 1))
    done = run_compose(wrong)
    assert done.returncode != 0
    assert "readonly" in done.stderr


@pytest.mark.parametrize("files", [(BASE,), (BASE, GPU)])
def test_replicas_start_with_these_settings(files: tuple[str, ...], tmp_path: Path) -> None:
    for name in REPLICAS:
        settings = settings_from(compose(*files)["services"][name]["environment"], tmp_path)
        assert settings.redis is not None
        assert settings.redis_password == "s3cret"
        assert settings.disk == "auto"
        assert settings.device == ("cuda" if GPU in files else Settings().device)


def test_only_grpc_metrics_grafana_and_gateway_are_published_on_loopback(services: dict[str, dict[str, Any]]) -> None:
    ports = [(name, port) for name, service in services.items() for port in service.get("ports", ())]
    published = {(name, port["target"]) for name, port in ports}
    grpc_and_metrics = {(name, port) for name in REPLICAS for port in (50051, 9464)}
    assert published == {*grpc_and_metrics, ("grafana", 3000), ("gateway", 30000)}
    assert {port["host_ip"] for _, port in ports} == {"127.0.0.1"}
    assert len({port["published"] for _, port in ports}) == len(ports)
    assert list(services["redis"]["networks"]) == list(services["prometheus"]["networks"]) == ["inside"]
    assert compose(BASE)["networks"]["inside"]["internal"] is True


def test_every_service_is_hardened_bounded_and_comes_back(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["restart"] == "unless-stopped", name
        assert {"cpus", "memory", "pids"} <= service["deploy"]["resources"]["limits"].keys(), name
        assert ":" in service["image"], name
        assert not service["image"].endswith(":latest"), name


def test_nothing_is_needed_that_is_only_a_help(services: dict[str, dict[str, Any]]) -> None:
    needs = [need for service in services.values() for need in service.get("depends_on", {}).values()]
    assert needs
    assert all(need["required"] is False for need in needs)


def test_containers_get_longer_than_the_server_takes_to_end(
    services: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    for name in REPLICAS:
        settings = settings_from(services[name]["environment"], tmp_path)
        assert services[name]["stop_grace_period"] == "1m30s"
        assert settings.grace_s + 60 <= 90


def test_no_secret_is_in_the_configuration(services: dict[str, dict[str, Any]]) -> None:
    """Secrets are files; the environment only says where they are."""
    everything = compose(BASE)
    assert {Path(secret["file"]) for secret in everything["secrets"].values()} == {
        ROOT / "secrets/redis_password",
        ROOT / "secrets/grafana_admin_password",
    }
    for service in services.values():
        for name, value in (service.get("environment") or {}).items():
            if "PASSWORD" in name or "SECRET" in name:
                assert value.startswith("/run/secrets/")
    ignored = subprocess.run(["git", "check-ignore", "-q", "secrets/redis_password"], cwd=ROOT, check=False)
    assert ignored.returncode == 0


def test_mounted_files_exist(services: dict[str, dict[str, Any]]) -> None:
    mounts = [mount for service in services.values() for mount in service.get("volumes", ())]
    binds = [Path(mount["source"]) for mount in mounts if mount["type"] == "bind"]
    assert binds
    assert [path for path in binds if not path.exists()] == []


def test_prometheus_scrapes_the_replicas(services: dict[str, dict[str, Any]]) -> None:
    text = (ROOT / "deploy/prometheus/prometheus.yml").read_text()
    assert all(f"{name}:9464" in text for name in REPLICAS)
    assert set(REPLICAS) <= services.keys()


def test_the_gateway_is_an_extra_and_knows_every_replica(services: dict[str, dict[str, Any]]) -> None:
    gateway = services["gateway"]
    assert gateway["profiles"] == ["gateway"]
    command = gateway["command"]
    assert command[command.index("--worker-urls") + 1 :] == [f"grpc://{name}:50051" for name in REPLICAS]


@pytest.mark.skipif(not SMG.exists(), reason="needs the gateway smg in .venv-smg")
def test_the_gateway_takes_its_command(services: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """As it stands, on this machine's ports: an unknown flag would end it at once."""
    ports = {"30000": str(free_port()), "29000": str(free_port())}
    command = services["gateway"]["command"]
    command = [re.sub(r"=(30000|29000)$", lambda match: f"={ports[match[1]]}", each) for each in command]
    command = [each.replace("=0.0.0.0", "=127.0.0.1") for each in command]
    command = [re.sub(r"replica-\d:50051", f"127.0.0.1:{free_port()}", each) for each in command]
    with subprocess.Popen(
        [SMG, *command], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            until(lambda: process.poll() is not None or answers(f"http://127.0.0.1:{ports['30000']}/health"))
            assert process.poll() is None
        finally:
            process.kill()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def test_each_gpu_replica_has_a_card_of_its_own() -> None:
    services = compose(BASE, GPU)["services"]
    devices = [services[name]["deploy"]["resources"]["reservations"]["devices"] for name in REPLICAS]
    assert [[device["device_ids"] for device in each] for each in devices] == [[["0"]], [["1"]]]
    assert {services[name]["build"]["target"] for name in REPLICAS} == {"cuda"}


def test_redis_runs_its_command_and_asks_for_the_password(services: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """The command as it stands, with this machine's port and file; the password isn't in the list of processes."""
    port = free_port()
    secret = tmp_path / "redis_password"
    secret.write_text("s3cret\n")
    script = services["redis"]["command"][2].replace("$$", "$")
    script = script.replace("/run/secrets/redis_password", str(secret)).replace("--port 6379", f"--port {port}")
    script = script.replace("--dir /tmp", f"--dir {tmp_path} --bind 127.0.0.1")

    def cli(*arguments: str, password: str | None = "s3cret") -> str:
        environment = {"PATH": "/usr/bin:/bin"} | ({"REDISCLI_AUTH": password} if password else {})
        command = ["redis-cli", "-p", str(port), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout.strip()

    server = subprocess.Popen(["sh", "-c", script], stdout=subprocess.DEVNULL)
    try:
        until(lambda: cli("ping") == "PONG")
        assert "NOAUTH" in cli("ping", password=None)
        assert cli("config", "get", "maxmemory").split()[1] == str(2 * 2**30)
        assert cli("config", "get", "maxmemory-policy").split()[1] == "allkeys-lru"
        assert "s3cret" not in Path(f"/proc/{server.pid}/cmdline").read_text()
        health_check = services["redis"]["healthcheck"]["test"][1].replace("$$", "$")
        health_check = health_check.replace("/run/secrets/redis_password", str(secret))
        health_check = health_check.replace("redis-cli ping", f"redis-cli -p {port} ping")
        assert subprocess.run(["sh", "-c", health_check], check=False).returncode == 0
    finally:
        server.terminate()
        server.wait(10)
