"""TLS for the gRPC port, with certificates that are taken up anew when their files change."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

import grpc

from prefixcache.errors import ConfigError
from prefixcache.server.file_signature import Signature, file_signature

_log = logging.getLogger(__name__)


class ServerCertificates:
    """Certificate and key of the server, and the authority that its clients must come from, if one is named.

    Every handshake looks at the files. If they have changed and fit together, this and later handshakes use them;
    otherwise that is reported once and the earlier ones stay in use. Open connections keep what they began with.
    Any thread.

    Raises:
        ConfigError: The files cannot be used; the message says which and why.
    """

    def __init__(self, cert: Path, key: Path, client_ca: Path | None = None) -> None:
        self._cert = cert
        self._key = key
        self._client_ca = client_ca
        self._signature = self._look()
        self._configuration = self._read()

    def credentials(self) -> grpc.ServerCredentials:
        """Return what the port is opened with; clients need a certificate where `client_ca` is given."""
        return grpc.dynamic_ssl_server_credentials(
            self._configuration,
            self._changed_configuration,  # type: ignore[arg-type]  # its stubs do not know that None means no change
            require_client_authentication=self._client_ca is not None,
        )

    def _changed_configuration(self) -> grpc.ServerCertificateConfiguration | None:
        """Return what a handshake is to use from now on, or None for what the one before it used."""
        signature = self._look()
        if signature == self._signature:
            return None
        self._signature = signature
        try:
            configuration = self._read()
        except ConfigError as error:
            _log.error("the earlier TLS certificate stays in use: %s", error)
            return None
        _log.info("TLS certificate read again")
        return configuration

    def _read(self) -> grpc.ServerCertificateConfiguration:
        """Read the files; gRPC itself would say nothing about what is wrong with them."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self._cert, self._key, password=lambda: b"")  # or it would ask at the terminal
        except OSError as error:  # ssl.SSLError is one
            raise ConfigError(f"tls-cert {self._cert} with tls-key {self._key}: {_reason(error)}") from error
        roots = None
        if self._client_ca is not None:
            try:
                context.load_verify_locations(self._client_ca)
            except OSError as error:
                raise ConfigError(f"tls-client-ca {self._client_ca}: {_reason(error)}") from error
            roots = self._client_ca.read_bytes()
        pair = self._key.read_bytes(), self._cert.read_bytes()
        return grpc.ssl_server_certificate_configuration([pair], roots)

    def _look(self) -> list[Signature | None]:
        """What changes with the files, also where they are replaced through a symbolic link."""
        paths = [path for path in (self._cert, self._key, self._client_ca) if path is not None]
        return [file_signature(path) for path in paths]


def _reason(error: OSError) -> str:
    """What is wrong, in OpenSSL's words without its numbers, such as `key values mismatch`."""
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.lower().replace("_", " ")
    return error.strerror or "is not a PEM file of this kind"
