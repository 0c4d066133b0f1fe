"""A thin typed client over the generated stubs."""

from prefixcache.client.aio import AsyncClient
from prefixcache.client.connection import Tls
from prefixcache.client.errors import RequestFailed
from prefixcache.client.sync import Client

__all__ = ["AsyncClient", "Client", "RequestFailed", "Tls"]
