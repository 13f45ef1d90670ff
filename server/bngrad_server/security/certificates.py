"""The server's certificate and the authorities of its clients, read again when the files change."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from bngrad_server.security.permissions import read_guarded
from bngrad_server.security.reload import ReloadedFiles
from bngrad_wire.http2.sockets import tls


class _Context(ssl.SSLContext):
    """What connections are shaken hands with.

    Attributes:
        client_ca: The authorities of clients.
    """

    client_ca: bytes | None = None


class Certificates:
    """The certificates of the TCP ports."""

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None) -> None:
        """Reads PEM files.

        Args:
            certificate: The server's certificate, followed by the intermediate ones.
            key: Its private key, without a password.
            client_ca: The authorities of clients; None where clients need no certificate.

        Raises:
            OSError: A file cannot be read.
            ValueError: A file has the wrong content, or every user of the host may change it.
        """
        paths = [path for path in (certificate, key, client_ca) if path]
        self._files = ReloadedFiles(paths, partial(_read, certificate, key, client_ca))

    @property
    def context(self) -> ssl.SSLContext:
        """The context for the next connection."""
        return self._files.content

    @property
    def client_ca(self) -> bytes | None:
        """The current authorities of clients; None where clients need no certificate."""
        return self._files.content.client_ca

    def is_outdated(self, sock: socket.socket) -> bool:
        """Whether the client of a TLS connection shows its certificate to other authorities than the current ones."""
        context = sock.context if isinstance(sock, ssl.SSLSocket) else None
        return isinstance(context, _Context) and context.client_ca != self.client_ca


def client_of_socket(sock: ssl.SSLSocket, default: str) -> str:
    """Returns the client that the certificate on a connection names, or the default without a certificate."""
    shown: dict[str, Any] = sock.getpeercert() or {}
    subject = [pair for part in shown.get("subject", ()) for pair in part]
    common = [value for name, value in subject if name == "commonName"]
    return _client_of(common, [value for _, value in shown.get("subjectAltName", ())], default)


def _client_of(common: Iterable[str], alternative: Iterable[str], default: str) -> str:
    name = next((name for name in (*common, *alternative) if name), None)
    return default if name is None else f"certificate {name}"


def _read(certificate_path: Path, key_path: Path, client_ca_path: Path | None) -> _Context:
    """Reads the files, and checks who may change them and that they belong together."""
    read_guarded(certificate_path, private=False)
    read_guarded(key_path, private=True)
    client_ca = None if client_ca_path is None else read_guarded(client_ca_path, private=False)
    context = _Context(ssl.PROTOCOL_TLS_SERVER)
    context.client_ca = client_ca
    tls.prepare(context)
    # A resumed session would skip the check of the client's certificate.
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    try:
        context.load_cert_chain(certificate_path, key_path, password=partial(_refuse_password, key_path))
    except ssl.SSLError as error:
        raise ValueError(f"{certificate_path} and {key_path} are not a certificate and its key: {error}") from error
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(cadata=client_ca.decode("ascii", "ignore"))
        except (ssl.SSLError, ValueError) as error:  # the latter for an empty file
            raise ValueError(f"{client_ca_path} has no certificate of an authority: {error}") from error
    return context


def _refuse_password(key_path: Path) -> str:
    raise ValueError(f"the key in {key_path} must not be encrypted: a server has no way to ask for the password")
