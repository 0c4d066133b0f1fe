"""Runs the topology until Ctrl-C: `make local`, or `python -m deploy.local [flags of prefixcache serve]`."""

from __future__ import annotations

import signal
import sys
import tempfile
from pathlib import Path

from deploy.local.topology import Topology
from prefixcache.errors import NotServing


def main() -> int:
    """Start everything, say where it is, and stop it on SIGINT or SIGTERM."""
    signals = {signal.SIGINT, signal.SIGTERM}
    with tempfile.TemporaryDirectory(prefix="prefixcache-local-") as folder:
        print(f"Starting Redis, two replicas and Prometheus; their logs are in {folder}", flush=True)
        try:
            with Topology(Path(folder), *sys.argv[1:]) as topology:
                signal.pthread_sigmask(signal.SIG_BLOCK, signals)
                for replica in topology.replicas:
                    print(f"{replica.name:12} grpc {replica.address}   {replica.metrics_url}")
                print(f"{'redis':12} redis://127.0.0.1:{topology.redis.port}")
                print(f"{'prometheus':12} {topology.prometheus_url}")
                print("Ctrl-C stops them.", flush=True)
                signal.sigwait(signals)
        except NotServing as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
