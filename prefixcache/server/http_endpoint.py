"""The HTTP port beside gRPC: `/metrics` for Prometheus, `/healthz` and `/readyz` for orchestrators.

It listens before the model is loaded and answers from threads of its own, so that a probe gets an answer while the
event loop or the engine is busy, or neither exists yet.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from types import TracebackType
from typing import Any, Self
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import make_wsgi_app

from prefixcache.metrics import Metrics
from prefixcache.server.health import Readiness

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class HttpEndpoint:
    """A running endpoint; made by `serve_http`. As a context manager it is stopped at the end."""

    def __init__(self, server: WSGIServer) -> None:
        self._server = server
        self._thread = threading.Thread(target=server.serve_forever, name="http", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port it listens on, also when it was asked for port 0."""
        return self._server.server_port

    def stop(self) -> None:
        """Closes the socket and ends the thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def serve_http(metrics: Metrics, readiness: Readiness, host: str, port: int) -> HttpEndpoint:
    """Starts to serve metrics and probes.

    Raises:
        OSError: The port is taken or the host is not ours.
    """
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]

    class Server(_ThreadingServer):
        address_family = family

    app = _build_app(metrics, readiness)
    return HttpEndpoint(make_server(str(address[0]), port, app, server_class=Server, handler_class=_SilentHandler))


def _build_app(metrics: Metrics, readiness: Readiness) -> App:
    metrics_app: App = make_wsgi_app(metrics.registry)  # speaks the text format, OpenMetrics and gzip

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        match environ["PATH_INFO"]:
            case "/metrics":
                return metrics_app(environ, start_response)
            case "/healthz":
                status, lines = "200 OK", ["alive"]
            case "/readyz":
                problem = readiness.problem
                status = "200 OK" if problem is None else "503 Service Unavailable"
                lines = ["ready" if problem is None else f"not ready: {problem}", *_suspended(metrics)]
            case _:
                status, lines = "404 Not Found", ["there are /metrics, /healthz and /readyz"]
        start_response(status, [("Content-Type", "text/plain; charset=utf-8"), ("Cache-Control", "no-store")])
        return ["".join(f"{line}\n" for line in lines).encode()]

    return app


def _suspended(metrics: Metrics) -> list[str]:
    """Names the stores that circuit breakers keep away from: they cost hits, and never readiness."""
    what = {"store": "the {} store is suspended", "writes": "writing to the {} store is suspended"}
    return [what[side].format(tier.value) for tier, side in sorted(metrics.tiers.suspended)]


class _ThreadingServer(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _SilentHandler(WSGIRequestHandler):
    timeout = 10  # seconds, for a client that connects and says nothing

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: probes and scrapes come all day."""
