"""Every test here runs on PyTorch's kernels and on our own. And stores that several tests put below the device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prefixcache import storage
from prefixcache.model.native import library
from prefixcache.request import Tier
from prefixcache.store.guard import GuardLimits
from tests.support import decoders
from tests.support.redis_server import RedisServer, redis_server
from tests.support.tiers import disk_settings

StoreSettings = tuple[Tier, dict[str, Any]]  # which tier it is, and the settings that reach it


@pytest.fixture(autouse=True, params=("torch", "native"))
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What computes the tiny models in this test."""
    name: str = request.param
    if name == "native" and library.load() is None:
        pytest.skip("our own kernels are not compiled here, or not for this CPU")
    monkeypatch.setattr(decoders, "kernels", name)
    return name


@pytest.fixture(autouse=True)
def patient_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores are waited for however busy this machine is: these tests are of what the values are."""
    set_guard(monkeypatch, 10.0)


def set_guard(monkeypatch: pytest.MonkeyPatch, base_s: float) -> None:
    """Sets how long stores are waited for that are opened from now on."""
    monkeypatch.setattr(storage, "GuardLimits", lambda: GuardLimits(base_s=base_s))


@pytest.fixture(scope="session")
def session_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
def server(session_server: RedisServer) -> RedisServer:
    session_server.cli("flushall")
    return session_server


@pytest.fixture(params=(Tier.DISK, Tier.REMOTE))
def store(request: pytest.FixtureRequest, tmp_path: Path, server: RedisServer) -> StoreSettings:
    """One store alone."""
    tier: Tier = request.param
    return tier, disk_settings(tmp_path / "disk") if tier is Tier.DISK else {"redis": server.url}
