#!/usr/bin/python3
"""Exits 0 if the server in this container is ready, 1 otherwise: what the image's HEALTHCHECK runs.

It asks the metrics port, which stays plain HTTP when gRPC has TLS, and uses the standard library alone, because it runs
every few seconds.
"""

import os
import sys
import urllib.error
import urllib.request

TIMEOUT_S = 4.0


def main() -> int:
    port = os.environ.get("PREFIXCACHE_METRICS_PORT", "9464")
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=TIMEOUT_S):
            return 0
    except (urllib.error.URLError, OSError) as error:  # an answer other than 200 is an HTTPError, which is a URLError
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
