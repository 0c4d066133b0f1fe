"""What a Redis URL may say, and that its secrets stay where they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefixcache.errors import ConfigError
from prefixcache.store.redis_url import Credentials, RedisTarget, Topology, parse_redis_url


@pytest.mark.parametrize(
    ("url", "topology", "hosts", "db"),
    [
        ("redis://cache", Topology.SINGLE, (("cache", 6379),), 0),
        ("redis://cache:7000/3", Topology.SINGLE, (("cache", 7000),), 3),
        ("redis://cache?db=2", Topology.SINGLE, (("cache", 6379),), 2),
        ("redis://", Topology.SINGLE, (("localhost", 6379),), 0),
        ("redis://[::1]:7000", Topology.SINGLE, (("::1", 7000),), 0),
        ("redis+cluster://a:1,b:2,c", Topology.CLUSTER, (("a", 1), ("b", 2), ("c", 6379)), 0),
        ("rediss+sentinel://a,b:2/pages/4", Topology.SENTINEL, (("a", 26379), ("b", 2)), 4),
    ],
)
def test_places(url: str, topology: Topology, hosts: tuple[tuple[str, int], ...], db: int) -> None:
    target = parse_redis_url(url)
    assert (target.topology, target.hosts, target.db) == (topology, hosts, db)


def test_unix_socket() -> None:
    target = parse_redis_url("unix://:secret@/run/redis.sock?db=1")
    assert (target.path, target.db, target.credentials.password) == ("/run/redis.sock", 1, "secret")
    assert str(target) == "unix://***@/run/redis.sock/1"


def test_credentials_are_decoded_and_never_shown() -> None:
    target = parse_redis_url("rediss://al%40ice:p%2Fw%3A%40rd@cache:7000/1")
    assert target.credentials == Credentials("al@ice", "p/w:@rd")
    assert target.tls is not None
    assert str(target) == "rediss://***@cache:7000/1"
    assert target.secrets == ("p/w:@rd",)
    assert "p/w:@rd" not in repr(target)


def test_sentinels_have_credentials_of_their_own() -> None:
    target = parse_redis_url("redis+sentinel://:one@a/pages?sentinel_username=watch&sentinel_password=two")
    assert target.service == "pages"
    assert target.credentials.password == "one"
    assert target.sentinel_credentials == Credentials("watch", "two")
    assert target.secrets == ("one", "two")
    assert str(target) == "redis+sentinel://***@a:26379/pages"


def test_tls_options(tmp_path: Path) -> None:
    for name in ("ca", "cert", "key"):
        (tmp_path / name).touch()
    files = f"ssl_ca_certs={tmp_path}/ca&ssl_certfile={tmp_path}/cert&ssl_keyfile={tmp_path}/key"
    tls = parse_redis_url(f"rediss://cache?{files}&ssl_check_hostname=false").tls
    assert tls is not None
    assert (tls.ca_file, tls.cert_file, tls.key_file) == tuple(f"{tmp_path}/{name}" for name in ("ca", "cert", "key"))
    assert (tls.check_hostname, tls.check_certificate) == (False, True)
    unchecked = parse_redis_url("rediss://cache?ssl_cert_reqs=none").tls
    assert unchecked is not None
    assert not unchecked.check_certificate


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://cache", "must start with one of redis://"),
        ("", "must start with one of redis://"),
        ("redis://cache?decode_responses=true", "would turn stored bytes into text"),
        ("redis://cache?encoding=utf-8", "would turn stored bytes into text"),
        ("redis://cache?socket_timeout=3", "there is no option 'socket_timeout'"),
        ("redis://cache?ssl_ca_certs=x", "write rediss in place of redis"),
        ("rediss://cache?ssl_ca_certs=/not/there", "no readable file /not/there"),
        ("rediss://cache?ssl_cert_reqs=maybe", "must be required or none"),
        ("rediss://cache?ssl_check_hostname=maybe", "must be true or false"),
        ("redis://a,b", "several hosts need"),
        ("redis://cache:port", "host:port"),
        ("redis://cache:99999", "host:port"),
        ("redis://[::1", "brackets"),
        ("redis://cache/one", "number of the database"),
        ("redis://cache/1/2", "more in the path"),
        ("redis+cluster://cache/1", "database 0 only"),
        ("redis+sentinel://cache", "name of the service"),
        ("unix://", "needs a path"),
        ("redis://:pass#word@cache", "%23"),
    ],
)
def test_what_cannot_work_is_said(url: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=r"^Redis URL: ") as refused:
        parse_redis_url(url)
    assert expected in str(refused.value)


def test_all_problems_at_once_and_no_secret() -> None:
    with pytest.raises(ConfigError) as refused:
        parse_redis_url("redis://user:hunter2@a,b:x/y?decode_responses=1&colour=blue")
    text = str(refused.value)
    assert text.count(";") == 4
    assert "hunter2" not in text


def test_a_target_can_be_made_without_a_url() -> None:
    assert str(RedisTarget("redis", (("cache", 1),))) == "redis://cache:1"


def test_a_password_that_was_kept_apart() -> None:
    assert parse_redis_url("redis://reader@cache", "s3#cret").credentials == Credentials("reader", "s3#cret")
    with pytest.raises(ConfigError, match="holds a password, and another one comes from a file") as caught:
        parse_redis_url("redis://reader:one@cache", "two")
    assert "two" not in str(caught.value)
