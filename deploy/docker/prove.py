"""Builds the CPU image without a Docker engine, and runs it as it would run: `make prove-image`.

    debootstrap ─▶ base image ─▶ buildah runs every line of the Dockerfile in chroots ─▶ its root file system
    that root, read-only, as the image's user, without any capability ─▶ healthy ─▶ one answer ─▶ SIGTERM ─▶ exit 0

Needs root, and Debian's buildah and debootstrap. The one difference from a build with Docker is the base: Debian's own
packages of the same release, instead of the image that is pinned by digest. Nothing but /tmp-like folders is written.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deploy.local.processes import free_port
from prefixcache.client import Client

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy/docker/Dockerfile"
LOCK_FILE = ROOT / "deploy/docker/lock.txt"
RELEASE = "bookworm"
BASE_IMAGE = f"localhost/debian:{RELEASE}-slim"
IMAGE = "localhost/prefixcache:cpu"
SITE_PACKAGES = "opt/prefixcache/lib/python3.11/site-packages"
NOT_WANTED = ("cc", "gcc", "g++", "clang", "nvcc", "make", "pip", "pip3")
START_LIMIT_S = 600.0
MOUNT_ROOT = """
set -eu
mount --bind "$1" "$2"
mount -o remount,bind,ro "$2"
mount -t tmpfs tmpfs "$2/tmp"
mount -t proc proc "$2/proc"
mount --rbind /dev "$2/dev"
mount --bind "$3" "$2/var/cache/prefixcache"
shift 3
exec "$@"
"""


class ProofFailedError(Exception):
    """The image is not what it should be."""


class Buildah:
    """Debian's buildah with images and containers in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._command = ["buildah", "--root", str(folder / "store"), "--runroot", str(folder / "run")]

    def __call__(self, *arguments: str) -> str:
        """Run one command, its messages on standard error, and return what it prints."""
        done = subprocess.run([*self._command, *arguments], stdout=subprocess.PIPE, text=True, check=True)
        return done.stdout.strip()

    def has(self, image: str) -> bool:
        """Tell whether an image is there."""
        command = [*self._command, "inspect", "--type", "image", image]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    @contextmanager
    def root_of(self, image: str) -> Iterator[Path]:
        """Yield the root file system of a new container, as it is before anything runs in it."""
        name = self("from", "--pull-never", image)
        try:
            yield Path(self("mount", name))
        finally:
            self("rm", name)


def make_base_image(buildah: Buildah, folder: Path) -> None:
    """Make an image of Debian's minimal system, once for each folder."""
    if buildah.has(BASE_IMAGE):
        return
    root = folder / "base"
    if not root.exists():
        subprocess.run(["debootstrap", "--variant=minbase", RELEASE, root], check=True, stdout=sys.stderr)
    name = buildah("from", "scratch")
    buildah("add", "--quiet", name, str(root), "/")
    buildah("config", "--env", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", name)
    buildah("commit", "--quiet", name, BASE_IMAGE)
    buildah("rm", name)


def build(buildah: Buildah, folder: Path) -> None:
    """Run the Dockerfile. Package clients find what this machine's own clients find."""
    volumes = [f"--volume={source}:{target}:ro" for source, target in _package_sources(folder)]
    buildah(
        *("bud", "--format", "docker", "--isolation", "chroot", "--network", "host", "--pull=false", "--layers"),
        *("--build-arg", f"BASE={BASE_IMAGE}", *volumes),
        *("--file", str(DOCKERFILE), "--tag", IMAGE, str(ROOT)),
    )


def _package_sources(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Yield what must be visible during the build: local wheels, certificates, and a configuration for pip."""
    options = []
    if certificates := os.environ.get("PIP_CERT"):
        shutil.copy(certificates, folder / "ca.crt")
        yield folder / "ca.crt", Path("/build-ca.crt")
        options.append("cert = /build-ca.crt")
    for place in os.environ.get("PIP_FIND_LINKS", "").split():
        yield Path(place), Path(place)
        options.append(f"find-links = {place}")
    (folder / "pip.conf").write_text("\n".join(["[global]", *options, ""]))
    yield folder / "pip.conf", Path("/etc/pip.conf")


def installed_packages(root: Path) -> dict[str, str]:
    """Name and version of every Python package in the image but our own and the model."""
    finder = "import importlib.metadata as m; [print(d.name, d.version) for d in m.distributions()]"
    output = subprocess.run(
        ["chroot", root, "/opt/prefixcache/bin/python", "-c", finder], stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    versions = dict(line.split() for line in output.splitlines())
    names = {name.lower().replace("_", "-"): version.partition("+")[0] for name, version in versions.items()}
    return {name: version for name, version in names.items() if name != "prefixcache"}


def check_packages(root: Path) -> None:
    """Compare the image with lock.txt; a lock that is out of date is written anew, to be looked at and committed."""
    comments = [line for line in LOCK_FILE.read_text().splitlines() if line.startswith("#")]
    pins = sorted(f"{name}=={version}" for name, version in installed_packages(root).items())
    content = "\n".join([*comments, *pins, ""])
    if content != LOCK_FILE.read_text():
        LOCK_FILE.write_text(content)
        raise ProofFailedError(
            "lock.txt was not what the image holds; it has been written anew: look at the difference"
        )


def check_contents(root: Path) -> None:
    """Nothing that compiles or installs, and nothing that belongs to somebody else than root, is in the image."""
    places = ("bin", "usr/bin", "usr/local/bin", "opt/prefixcache/bin")
    found = [f"/{place}/{name}" for place in places for name in NOT_WANTED if os.path.lexists(root / place / name)]
    if found:
        raise ProofFailedError(f"the image holds {', '.join(found)}")
    writable = subprocess.run(
        ["find", root / "opt", "(", "-not", "-uid", "0", "-o", "-perm", "-o+w", ")", "-not", "-type", "l", "-print"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout.split()
    if writable:
        raise ProofFailedError(f"others than root may change {writable[0]} and {len(writable) - 1} more")


def run_and_ask(root: Path, config: Mapping[str, Any], folder: Path) -> str:
    """Start the image as a container would, wait for its health check, ask once, stop it; return what was seen.

    The root is read-only, the user and the environment are the image's, and no capability can be had.
    """
    port, metrics_port = free_port(), free_port()
    environment = [*config["Env"], f"PREFIXCACHE_PORT={port}", f"PREFIXCACHE_METRICS_PORT={metrics_port}"]
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        mount_point, volume = Path(scratch, "root"), Path(scratch, "volume")
        for path in (mount_point, volume):
            path.mkdir()
        user, _, group = config["User"].partition(":")
        os.chown(volume, int(user), int(group))

        def command(*arguments: str) -> list[str]:
            drop = ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups"]
            drop += ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
            inside = f"cd {shlex.quote(config['WorkingDir'])}; exec {shlex.join([*drop, *arguments])}"
            return [
                *("unshare", "--mount", "--propagation", "private", "sh", "-c", MOUNT_ROOT, "prove"),
                *(str(root), str(mount_point), str(volume)),
                *("env", "-i", str(shutil.which("chroot")), str(mount_point), "/usr/bin/env", *environment),
                *("sh", "-c", inside),
            ]

        started_at = time.monotonic()
        server = subprocess.Popen(command(*config["Entrypoint"], *config["Cmd"]), stdout=subprocess.DEVNULL)
        try:
            _wait_until_healthy(server, command(*config["Healthcheck"]["Test"][1:]))
            healthy_s = time.monotonic() - started_at
            with Client(f"127.0.0.1:{port}") as client:
                reply = client.complete("The capital of France is", max_tokens=8, temperature=0.0)
            server.send_signal(signal.SIGTERM)
            exit_code = server.wait(60)
        finally:
            if server.poll() is None:
                server.kill()
                server.wait()
        if exit_code != 0:
            raise ProofFailedError(f"after SIGTERM it ended with exit code {exit_code}")
        return f"healthy after {healthy_s:.0f} s, answered {reply.samples[0].text!r}, ended with exit code 0"


def _wait_until_healthy(server: subprocess.Popen[bytes], health_check: Sequence[str]) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while subprocess.run(health_check, capture_output=True, check=False).returncode != 0:
        if server.poll() is not None:
            raise ProofFailedError(f"the server ended with exit code {server.returncode} before it was healthy")
        if time.monotonic() > deadline:
            raise ProofFailedError(f"not healthy after {START_LIMIT_S:.0f} s")
        time.sleep(1.0)


def main() -> int:
    """Build, look, run; print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp/prefixcache-image"), help="kept for the next run")
    folder: Path = parser.parse_args().folder
    if os.geteuid() != 0 or not all(map(shutil.which, ("buildah", "debootstrap", "unshare", "setpriv"))):
        print("This needs root, and: apt-get install buildah debootstrap", file=sys.stderr)
        return 1
    folder.mkdir(parents=True, exist_ok=True)
    buildah = Buildah(folder)
    make_base_image(buildah, folder)
    build(buildah, folder)
    config = json.loads(buildah("inspect", "--type", "image", IMAGE))["Docker"]["config"]
    try:
        with buildah.root_of(IMAGE) as root:
            check_packages(root)
            check_contents(root)
            size = sum(path.lstat().st_size for path in root.rglob("*") if not path.is_dir())
            print(f"built: {size / 1e6:,.0f} MB, {len(installed_packages(root))} packages as in lock.txt")
            print(run_and_ask(root, config, folder))
    except ProofFailedError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
