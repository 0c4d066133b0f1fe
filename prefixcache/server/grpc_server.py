"""Builds the gRPC server, with every limit of the transport set on purpose."""

from __future__ import annotations

import grpc
from grpc.aio import Server
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc

from prefixcache._pb.prefixcache.v1 import inference_pb2, inference_pb2_grpc
from prefixcache.errors import ConfigError
from prefixcache.server.health import HealthMonitor
from prefixcache.server.interceptors import CallInterceptor
from prefixcache.server.servicer import InferenceServicer
from prefixcache.server.servicer_vllm import VllmServicer
from prefixcache.server.tls import ServerCertificates

# Clients may ping every 10 s, also between calls. gRPC closes connections that ping more often than allowed three
# times, and timers are not exact, so what is enforced is half of what is promised.
MIN_CLIENT_PING_INTERVAL_MS = 5_000
# Our own pings find clients that vanished without closing their connection; their requests are then aborted.
SERVER_PING_INTERVAL_MS = 30_000
SERVER_PING_TIMEOUT_MS = 10_000


def build_grpc_server(
    servicer: InferenceServicer,
    vllm_servicer: VllmServicer,
    health: HealthMonitor,
    interceptor: CallInterceptor,
    *,
    max_message_bytes: int,
    max_concurrent_streams: int,
) -> Server:
    """Puts services, interceptor and transport limits together; nothing listens yet.

    `max_message_bytes` holds in both directions. Calls beyond `max_concurrent_streams` on one connection wait in the
    client, unseen by us, so it should be above what the engine's queue takes.
    """
    server = grpc.aio.server(
        interceptors=[interceptor],
        options=[
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.max_concurrent_streams", max_concurrent_streams),
            ("grpc.http2.min_ping_interval_without_data_ms", MIN_CLIENT_PING_INTERVAL_MS),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.keepalive_time_ms", SERVER_PING_INTERVAL_MS),
            ("grpc.keepalive_timeout_ms", SERVER_PING_TIMEOUT_MS),
            ("grpc.http2.max_pings_without_data", 0),  # no limit on our own pings during a long silent prefill
            ("grpc.so_reuseport", 0),  # two servers on one port would share its clients by chance; fail instead
        ],
    )
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(vllm_servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(health.servicer, server)
    services = (inference_pb2.DESCRIPTOR, vllm_engine_pb2.DESCRIPTOR, health_pb2.DESCRIPTOR)
    names = [service.full_name for file in services for service in file.services_by_name.values()]
    reflection.enable_server_reflection([*names, reflection.SERVICE_NAME], server)
    return server


def listen(server: Server, host: str, port: int, certificates: ServerCertificates | None = None) -> int:
    """Takes the port, with TLS if there are certificates, and returns it, since port 0 asks for any.

    Raises:
        ConfigError: The port is taken, or the host is not ours.
    """
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if certificates is not None:
            return server.add_secure_port(address, certificates.credentials())
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {address}: the port is taken or the host is not ours") from error
