"""The server's certificate, and whose certificates it accepts; read again when the files change."""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from bngrad_server.security.reload import ReloadedFiles
from bngrad_wire.http2 import tls


@dataclass(frozen=True, slots=True)
class CertificatePaths:
    """PEM files.

    Attributes:
        certificate: The server's certificate, and those between it and its authority.
        key: Its private key, without a password.
        client_ca: The authorities whose certificates clients must have; None where clients need none.
    """

    certificate: Path
    key: Path
    client_ca: Path | None

    def read(self) -> _Loaded:
        """Reads the files, and checks that they belong together.

        Raises:
            OSError: A file cannot be read.
            ValueError: A file is not what it should be.
        """
        certificate, key = self.certificate.read_bytes(), self.key.read_bytes()
        client_ca = None if self.client_ca is None else self.client_ca.read_bytes()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.prepare(context)
        # A session that is taken up again would skip the look at the client's certificate.
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
        try:
            context.load_cert_chain(self.certificate, self.key, password=_no_password)
        except ssl.SSLError as error:
            raise ValueError(f"{self.certificate} and {self.key} are no certificate with its key: {error}") from error
        if client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                context.load_verify_locations(cadata=client_ca.decode("ascii", "replace"))
            except ssl.SSLError as error:
                raise ValueError(f"{self.client_ca} has no certificates of authorities: {error}") from error
        return _Loaded(certificate, key, client_ca, context)


@dataclass(frozen=True, slots=True)
class _Loaded:
    certificate: bytes
    key: bytes
    client_ca: bytes | None
    context: ssl.SSLContext

    def for_grpc(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(self.key, self.certificate)], self.client_ca)


class Certificates:
    """What both doors show and ask for.

    Attributes:
        requires_client_certificate: Whether clients must have certificates.
    """

    def __init__(self, paths: CertificatePaths) -> None:
        """Reads the files.

        Raises:
            OSError: A file cannot be read.
            ValueError: A file is not what it should be.
        """
        self._files = ReloadedFiles(
            [path for path in (paths.certificate, paths.key, paths.client_ca) if path], paths.read
        )
        self.requires_client_certificate = paths.client_ca is not None

    @property
    def context(self) -> ssl.SSLContext:
        """For the next connection to the server's own endpoint."""
        return self._files.content.context

    @property
    def client_ca(self) -> bytes | None:
        """The authorities whose certificates clients must have now."""
        return self._files.content.client_ca

    def credentials(self) -> grpc.ServerCredentials:
        """For one port of grpcio, which asks for news before each handshake."""
        told = self._files.content

        def news() -> grpc.ServerCertificateConfiguration | None:
            nonlocal told
            if told is self._files.content:
                return None
            told = self._files.content
            return told.for_grpc()

        return grpc.dynamic_ssl_server_credentials(
            told.for_grpc(),
            news,  # type: ignore[arg-type]  # None means that there is none
            self.requires_client_certificate,
        )


def client_of_socket(sock: ssl.SSLSocket, otherwise: str) -> str:
    """Whom a connection belongs to whose client has shown a certificate, and else."""
    shown: dict[str, Any] = sock.getpeercert() or {}
    subject = [pair for part in shown.get("subject", ()) for pair in part]
    common = [value for name, value in subject if name == "commonName"]
    return _client_of(common, [value for _, value in shown.get("subjectAltName", ())], otherwise)


def client_of_context(context: grpc.ServicerContext, otherwise: str) -> str:
    """Alike, of a call on grpcio."""
    shown: Mapping[str, Any] = context.auth_context()
    common, alternative = (
        [value.decode(errors="replace") for value in shown.get(name, ())]
        for name in ("x509_common_name", "x509_subject_alternative_name")
    )
    return _client_of(common, alternative, otherwise)


def _client_of(common: Iterable[str], alternative: Iterable[str], otherwise: str) -> str:
    name = next((name for name in (*common, *alternative) if name), None)
    return otherwise if name is None else f"certificate {name}"


def _no_password() -> str:
    raise ValueError("the private key must not be encrypted, since nobody is there to give the password")
