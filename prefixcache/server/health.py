"""Health as load balancers and probes see it: serving only while the engine's loop comes round."""

from __future__ import annotations

import asyncio
import logging
import time

from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health_aio  # type: ignore[attr-defined]  # the type stubs do not know it

from prefixcache.engine.engine import Engine
from prefixcache.errors import EngineFailed, NotServing

CHECK_INTERVAL_S = 0.1
SERVICE_NAMES = ("", "prefixcache.v1.Inference", "vllm.grpc.engine.VllmEngine")

_log = logging.getLogger(__name__)


class Readiness:
    """Whether requests should be sent here, and if not, why not. Any thread.

    True only while it is confirmed again and again, so that an event loop that is stuck is not ready either.
    """

    def __init__(self) -> None:
        self._problem: str | None = "the model is being loaded"
        self._confirmed_until_s = 0.0

    def confirm(self, for_s: float) -> None:
        """Be ready, for this long."""
        self._confirmed_until_s = time.monotonic() + for_s
        self._problem = None

    def deny(self, problem: str) -> None:
        """Be not ready until the next confirmation."""
        self._problem = problem

    @property
    def problem(self) -> str | None:
        """Why it is not ready; None if it is."""
        if self._problem is None and time.monotonic() > self._confirmed_until_s:
            return "the event loop is stuck"
        return self._problem


class HealthMonitor:
    """Looks at the engine ten times a second and sets the standard health service and readiness accordingly.

    Event loop only. An engine that is stuck longer than `stall_timeout_s` turns health to NOT_SERVING and ends all
    open requests with UNAVAILABLE, those that arrive meanwhile too; if it comes round again, so does health.
    """

    def __init__(self, engine: Engine, stall_timeout_s: float, readiness: Readiness) -> None:
        self.servicer = health_aio.HealthServicer()
        self._engine = engine
        self._stall_timeout_s = stall_timeout_s
        self._readiness = readiness
        self._is_serving: bool | None = None
        self._has_stopped = False

    @property
    def problem(self) -> str | None:
        """Why no requests should be sent here; None if they should."""
        return self._readiness.problem

    async def watch(self) -> EngineFailed:
        """Checks until the engine has failed, then returns why; health is NOT_SERVING from then on."""
        while self._engine.failure is None:
            await self.check()
            await asyncio.sleep(CHECK_INTERVAL_S)
        await self.stop_serving()
        return self._engine.failure

    async def check(self) -> None:
        """Compares the engine's heartbeat with the time it may take, once."""
        age_s = self._engine.heartbeat_age_s()
        await self._set_serving(age_s <= self._stall_timeout_s)
        problem = f"the engine has been stuck for {age_s:.1f} s"
        if not self._is_serving:
            self._engine.fail_open_requests(NotServing(problem))
        if self._has_stopped:
            return
        if self._is_serving:
            self._readiness.confirm(self._stall_timeout_s)
        else:
            self._readiness.deny(problem)

    async def stop_serving(self) -> None:
        """Turns health to NOT_SERVING for good."""
        self._has_stopped = True
        failure = self._engine.failure
        self._readiness.deny("the server is shutting down" if failure is None else str(failure))
        await self.servicer.enter_graceful_shutdown()

    async def _set_serving(self, is_serving: bool) -> None:
        if is_serving == self._is_serving:
            return
        self._is_serving = is_serving
        if not is_serving:
            _log.error("health is NOT_SERVING: the engine is stuck")
        status = health_pb2.HealthCheckResponse
        for name in SERVICE_NAMES:
            await self.servicer.set(name, status.SERVING if is_serving else status.NOT_SERVING)
