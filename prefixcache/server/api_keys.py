"""API keys: which tenant a call comes from. The server knows their digests only.

    # one key a line; a tenant may have several, so that they can be changed without a break
    SHA-256 of the key, 64 hex digits     name of the tenant

Keys are random numbers of 256 bits, so one round of SHA-256 is enough: there is nothing to guess.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
import time
from collections.abc import Iterable
from pathlib import Path

from prefixcache.errors import ConfigError, Unauthenticated
from prefixcache.server.file_signature import file_signature

AUTHORIZATION_KEY = "authorization"
KEY_PREFIX = "pfx_"  # lets scanners for leaked secrets know it
KEY_BYTES = 32
# How old the answer to "has the file changed?" may be.
RELOAD_S = 1.0

_LINE = re.compile(r"(?P<digest>[0-9a-f]{64})\s+(?P<tenant>\S+)")
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

_log = logging.getLogger(__name__)


class ApiKeys:
    """The keys in a file, read again whenever it changes. Event loop only.

    A file that cannot be used is refused at start. Later it is reported once and the earlier keys stay in use, since
    it may be half written.

    Raises:
        ConfigError: The file cannot be used; the message names every line that is wrong, and shows none.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._signature = file_signature(path)
        self._tenants = read_keys(path)
        self._looked_at_s = time.monotonic()

    def tenant_of(self, metadata: Iterable[tuple[str, str | bytes]]) -> str:
        """Return the tenant whose key a call carries; raises Unauthenticated."""
        self._read_again_if_changed()
        values = [value for key, value in metadata if key == AUTHORIZATION_KEY]
        if len(values) != 1 or not isinstance(values[0], str):
            raise Unauthenticated("this server wants one API key, sent as metadata: authorization: Bearer KEY")
        scheme, _, key = values[0].partition(" ")
        if scheme.lower() != "bearer":
            raise Unauthenticated("the authorization must read: Bearer KEY")
        tenant = self._tenants.get(key_digest(key.strip()))
        if tenant is None:
            raise Unauthenticated("the API key is not known")
        return tenant

    def _read_again_if_changed(self) -> None:
        now_s = time.monotonic()
        if now_s - self._looked_at_s < RELOAD_S:
            return
        self._looked_at_s = now_s
        signature = file_signature(self._path)
        if signature == self._signature:
            return
        self._signature = signature
        try:
            self._tenants = read_keys(self._path)
        except ConfigError as error:
            _log.error("the earlier API keys stay in use: %s", error)
        else:
            _log.info("API keys read again: %d of %d tenants", len(self._tenants), len(set(self._tenants.values())))


def read_keys(path: Path) -> dict[str, str]:
    """Read a file of API keys: digest to tenant; raises ConfigError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise ConfigError(f"{path}: {reason}") from error
    tenants: dict[str, str] = {}
    problems: list[str] = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        parts = _LINE.fullmatch(text)
        if parts is None or not is_tenant(parts["tenant"]):
            problems.append(f"line {number} is not a SHA-256 in 64 lower-case hex digits and the name of a tenant")
        elif tenants.setdefault(parts["digest"], parts["tenant"]) != parts["tenant"]:
            problems.append(f"line {number} gives a key to a second tenant")
    if not tenants and not problems:
        problems.append("there is no key in it; make one with: prefixcache new-key TENANT")
    if problems:
        raise ConfigError("\n".join(f"{path}: {problem}" for problem in problems))
    return tenants


def new_key() -> str:
    """Make up a key."""
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def key_digest(key: str) -> str:
    """Return what the file has instead of the key."""
    return hashlib.sha256(key.encode()).hexdigest()


def is_tenant(name: str) -> bool:
    """Whether a tenant may be called so: up to 64 letters, digits, dots, dashes and underscores."""
    return _TENANT.fullmatch(name) is not None
