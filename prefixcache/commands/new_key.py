"""Make an API key for a tenant.

The key goes to stderr and is shown this once; the line for the server's file of keys, with its digest, goes to stdout.

Examples:
  prefixcache new-key acme >> api-keys
  prefixcache serve --api-keys api-keys
"""

from __future__ import annotations

import argparse
import sys

from prefixcache.errors import InvalidRequest
from prefixcache.server.api_keys import is_tenant, key_digest, new_key


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tenant", metavar="TENANT", help="whose key it is; tenants share no cached prefixes")


def run(args: argparse.Namespace) -> int:
    if not is_tenant(args.tenant):
        raise InvalidRequest(
            "TENANT", "must be 1 to 64 letters, digits, dots, dashes and underscores, the first a letter or digit"
        )
    key = new_key()
    print(key, file=sys.stderr)
    print(key_digest(key), args.tenant)
    return 0
