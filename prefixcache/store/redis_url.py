"""Where a Redis is and how to get in, read from one URL.

    redis://[user:password@]host[:6379][/db]                         one server
    unix://[user:password@]/path/to/socket[?db=0]                    one server on this machine
    redis+sentinel://[user:password@]host[:26379],host/service[/db]  the master that Sentinel names
    redis+cluster://[user:password@]host[:6379],host                 a cluster

`rediss` in place of `redis` means TLS. Options follow as `?name=value&…`: `ssl_ca_certs`, `ssl_certfile` and
`ssl_keyfile` are paths, `ssl_check_hostname=false` and `ssl_cert_reqs=none` loosen the checks, `sentinel_username` and
`sentinel_password` are for the Sentinels themselves, and `db` may stand here as well.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from enum import StrEnum
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from prefixcache.errors import ConfigError

DEFAULT_PORT = 6379
DEFAULT_SENTINEL_PORT = 26379
MASK = "***"
NO = ("false", "0", "no")
YES = ("true", "1", "yes")


class Topology(StrEnum):
    SINGLE = "single"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


SCHEMES = {
    "redis": Topology.SINGLE,
    "rediss": Topology.SINGLE,
    "unix": Topology.SINGLE,
    "redis+sentinel": Topology.SENTINEL,
    "rediss+sentinel": Topology.SENTINEL,
    "redis+cluster": Topology.CLUSTER,
    "rediss+cluster": Topology.CLUSTER,
}
TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname", "ssl_cert_reqs")
SENTINEL_OPTIONS = ("sentinel_username", "sentinel_password")


@dataclass(frozen=True, slots=True)
class Credentials:
    """A password and, with access control lists, a user."""

    username: str | None = None
    password: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Tls:
    """Paths to the authority's certificate and to our own certificate and key, and what of the peer's is checked."""

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    check_hostname: bool = True
    check_certificate: bool = True


@dataclass(frozen=True, slots=True)
class RedisTarget:
    """What one URL says. As text it is the URL again, with `***` for user and passwords."""

    scheme: str
    hosts: tuple[tuple[str, int], ...] = ()
    path: str = ""  # of a unix socket
    service: str = ""  # the master's name at the Sentinels
    db: int = 0
    credentials: Credentials = Credentials()
    sentinel_credentials: Credentials = Credentials()
    tls: Tls | None = None

    @property
    def topology(self) -> Topology:
        return SCHEMES[self.scheme]

    @property
    def secrets(self) -> tuple[str, ...]:
        """What must not appear in any message."""
        return tuple(each.password for each in (self.credentials, self.sentinel_credentials) if each.password)

    def __str__(self) -> str:
        has_user = self.credentials != Credentials()
        place = self.path or ",".join(
            f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts
        )
        service = f"/{self.service}" if self.service else ""
        return f"{self.scheme}://{MASK + '@' if has_user else ''}{place}{service}" + (f"/{self.db}" if self.db else "")


def parse_redis_url(url: str, password: str | None = None) -> RedisTarget:
    """Reads a URL, and takes a password that was kept apart from it.

    Raises:
        ConfigError: The URL cannot work; all its problems are listed, and no secret is repeated.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ConfigError("Redis URL: the brackets of an IPv6 address do not match") from None
    if parts.scheme not in SCHEMES:
        raise ConfigError(f"Redis URL: it must start with one of {', '.join(f'{scheme}://' for scheme in SCHEMES)}")
    problems: list[str] = []
    if parts.fragment:
        problems.append("write # in a password as %23")
    options = _read_options(parts, problems)
    user_info, _, places = parts.netloc.rpartition("@")
    username, _, password_in_url = user_info.partition(":")
    if password and password_in_url:
        problems.append("it holds a password, and another one comes from a file")
    target = RedisTarget(
        scheme=parts.scheme,
        credentials=Credentials(unquote(username) or None, password or unquote(password_in_url) or None),
        sentinel_credentials=Credentials(options.get("sentinel_username"), options.get("sentinel_password")),
        tls=_read_tls(options, problems) if parts.scheme.startswith("rediss") else None,
    )
    if parts.scheme == "unix":
        target = replace(target, path=unquote(parts.path))
        if not target.path:
            problems.append("a unix socket needs a path")
        db = options.get("db", "0")
    else:
        target = replace(target, hosts=_read_hosts(places, target.topology, problems))
        segments = [unquote(segment) for segment in parts.path.split("/") if segment]
        if target.topology is Topology.SENTINEL:
            target = replace(target, service=segments.pop(0) if segments else "")
            if not target.service:
                problems.append("Sentinel needs the name of the service: …://host:26379/name")
        db = segments.pop(0) if segments else options.get("db", "0")
        if segments:
            problems.append("there is more in the path than the number of the database")
    if not db.isdecimal():
        problems.append("the number of the database must be 0 or more")
    elif target.topology is Topology.CLUSTER and int(db):
        problems.append("a cluster has database 0 only")
    if problems:
        raise ConfigError("Redis URL: " + "; ".join(problems))
    return replace(target, db=int(db))


def _read_options(parts: SplitResult, problems: list[str]) -> dict[str, str]:
    known = ["db"]
    if parts.scheme.startswith("rediss"):
        known += TLS_OPTIONS
    if SCHEMES[parts.scheme] is Topology.SENTINEL:
        known += SENTINEL_OPTIONS
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name in options.keys() - set(known):
        if name in TLS_OPTIONS:
            problems.append(f"the option {name} needs TLS: write rediss in place of redis")
        elif name in ("decode_responses", "encoding", "encoding_errors"):
            problems.append(f"the option {name} would turn stored bytes into text")  # field report E12
        else:
            problems.append(f"there is no option {name!r} here; the options are {', '.join(known)}")
    return options


def _read_tls(options: dict[str, str], problems: list[str]) -> Tls:
    check_hostname = options.get("ssl_check_hostname", "true").lower()
    if check_hostname not in YES + NO:
        problems.append("ssl_check_hostname must be true or false")
    certificates = options.get("ssl_cert_reqs", "required").lower()
    if certificates not in ("required", "none"):
        problems.append("ssl_cert_reqs must be required or none")
    problems += (
        f"{name}: there is no readable file {options[name]}"
        for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
        if name in options and not os.access(options[name], os.R_OK)
    )
    return Tls(
        ca_file=options.get("ssl_ca_certs"),
        cert_file=options.get("ssl_certfile"),
        key_file=options.get("ssl_keyfile"),
        check_hostname=check_hostname in YES,
        check_certificate=certificates == "required",
    )


def _read_hosts(places: str, topology: Topology, problems: list[str]) -> tuple[tuple[str, int], ...]:
    default = DEFAULT_SENTINEL_PORT if topology is Topology.SENTINEL else DEFAULT_PORT
    hosts = []
    for place in places.split(","):
        try:
            parts = urlsplit(f"//{place}")
            hosts.append((parts.hostname or "localhost", parts.port or default))
        except ValueError:
            problems.append("each host must be written as host or host:port, with a port of 1 to 65535")
    if topology is Topology.SINGLE and len(hosts) > 1:
        problems.append("several hosts need redis+cluster:// or redis+sentinel://")
    return tuple(hosts)
