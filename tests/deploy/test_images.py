"""The images' recipe: linted, pinned, with settings that the server knows. `make prove-image` builds and runs it."""

from __future__ import annotations

import fnmatch
import re
import shlex
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.deployed_settings import settings_from

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy/docker/Dockerfile"
GATEWAY_DOCKERFILE = ROOT / "deploy/docker/gateway.Dockerfile"
HEALTH_CHECK = ROOT / "deploy/docker/healthcheck.py"


def instructions() -> Iterator[tuple[str, str, str]]:
    """Stage, name and arguments of each instruction."""
    stage = ""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE)
    for line in re.sub(r"\\\n", " ", text).splitlines():
        name, _, arguments = line.strip().partition(" ")
        if name == "FROM":
            stage = arguments.split()[-1]
        if name:
            yield stage, name, arguments.strip()


def pins(path: Path) -> dict[str, str]:
    """Version of each package that a file pins."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}


@pytest.mark.parametrize("recipe", [DOCKERFILE, GATEWAY_DOCKERFILE])
def test_hadolint_has_nothing_to_say(recipe: Path) -> None:
    hadolint = shutil.which("hadolint", path=Path(sys.executable).parent)
    assert hadolint is not None
    done = subprocess.run([hadolint, "--no-color", recipe], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_gateways_image_has_the_version_that_is_tested_and_the_same_base() -> None:
    recipe = GATEWAY_DOCKERFILE.read_text()
    [version] = re.findall(r"^SMG_VERSION := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert f"smg=={version}" in recipe
    [base] = re.findall(r"^ARG BASE=.*$", DOCKERFILE.read_text(), re.MULTILINE)
    assert base in recipe
    assert re.search(r"^USER [1-9]\d*:[1-9]\d*$", recipe, re.MULTILINE)


def test_bases_are_pinned_by_digest_and_packages_by_version() -> None:
    bases = [arguments for stage, name, arguments in instructions() if name == "FROM"]
    stages = {stage for stage, _, _ in instructions()}
    assert {base.split()[0] for base in bases} <= {"${BASE}", *stages}
    [base] = [arguments for _, name, arguments in instructions() if name == "ARG" and arguments.startswith("BASE=")]
    assert re.fullmatch(r"BASE=debian:\S+@sha256:[0-9a-f]{64}", base)
    locked = pins(ROOT / "deploy/docker/lock.txt")
    constraints = pins(ROOT / "constraints.txt")
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {canonicalize_name(Requirement(line).name) for line in needed} <= locked.keys()
    assert {name: locked[name] for name in locked.keys() & constraints.keys()}.items() <= constraints.items()


def test_no_registry_is_named() -> None:
    """Where packages come from is the builder's choice."""
    assert not re.search(r"https?://", DOCKERFILE.read_text())


@pytest.mark.parametrize("stage", ["cpu", "cuda"])
def test_the_server_knows_every_variable(stage: str, tmp_path: Path) -> None:
    environment: dict[str, str] = {}
    for where, name, arguments in instructions():
        if name == "ENV" and where in ("runtime", stage):
            environment |= dict(pair.split("=", 1) for pair in shlex.split(arguments))
    settings = settings_from(environment, tmp_path)
    assert settings.device == stage
    assert settings.host == settings.metrics_host == "0.0.0.0"


def test_it_runs_as_a_numbered_user_with_a_patient_health_check() -> None:
    runtime = {name: arguments for stage, name, arguments in instructions() if stage == "runtime"}
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", runtime["USER"])
    [start_period] = re.findall(r"--start-period=(\d+)s", runtime["HEALTHCHECK"])
    assert int(start_period) >= 300
    assert runtime["STOPSIGNAL"] == "SIGTERM"
    assert list(instructions())[-1][0] == "cpu"  # what is built when no target is named


def test_the_build_context_holds_what_is_copied_and_no_more() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    let_in = [line[1:].rstrip("/") for line in lines if line.startswith("!")]
    copied = [
        source
        for _, name, arguments in instructions()
        if name == "COPY" and not arguments.startswith("--from")
        for source in arguments.split()[:-1]
    ]
    assert sorted(copied) == sorted(let_in)
    assert all((ROOT / source).exists() for source in copied)
    assert any(fnmatch.fnmatch("prefixcache/engine/__pycache__", pattern) for pattern in lines)


@contextmanager
def answering(status: int) -> Iterator[int]:
    """A port whose /readyz answers with one status."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/readyz" else 404)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@pytest.mark.parametrize(("status", "exit_code"), [(200, 0), (503, 1), (404, 1)])
def test_health_check(status: int, exit_code: int) -> None:
    with answering(status) as port:
        assert run_health_check(port) == exit_code


def test_health_check_where_nobody_listens() -> None:
    with answering(200) as port:
        pass
    assert run_health_check(port) == 1


def run_health_check(port: int) -> int:
    environment = {"PREFIXCACHE_METRICS_PORT": str(port)}
    return subprocess.run([sys.executable, HEALTH_CHECK], env=environment, capture_output=True, check=False).returncode
