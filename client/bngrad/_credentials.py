"""How a client knows its server, and how the server knows the client."""

from __future__ import annotations

import functools
import ipaddress
import os
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import grpc

from bngrad._balancing.resolver import host_and_port
from bngrad._errors import FieldViolation, invalid_argument
from bngrad._validation import ChannelOption
from bngrad_wire.http2 import tls

Token: TypeAlias = str | os.PathLike[str] | Callable[[], str]
_LOCAL_SCHEMES = ("unix:", "unix-abstract:")
_PLAIN = "the token would travel unencrypted to {}: give tls as well, or insecure=True if the network is protected"


@dataclass(frozen=True)
class Tls:
    """What a client needs to know its server by, and to show to it.

    The files are read when a connection to a server is first made, so a new client sees new files.

    Attributes:
        ca: A PEM file with the authorities whose certificates servers may have; None for those that the system trusts.
        certificate: A PEM file with the client's own certificate, for servers that ask for one.
        key: A PEM file with its private key, without a password.
        server_name: The name that the servers' certificates must have; None for that of the target.
    """

    ca: str | os.PathLike[str] | None = None
    certificate: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            missing = "key" if self.key is None else "certificate"
            description = f"tls must have both certificate and key, or neither; it has no {missing}"
            raise invalid_argument(FieldViolation("tls", description))
        for name in ("ca", "certificate", "key"):
            path = getattr(self, name)
            if path is not None:
                _read(f"tls.{name}", path)
        self.context()

    def context(self) -> ssl.SSLContext:
        """What Python's ssl makes of it.

        Raises:
            InvalidArgumentError: A file is not what it should be.
        """
        part = "ca"
        try:
            context = ssl.create_default_context(cafile=self.ca)
            part = "certificate"
            if self.certificate is not None:
                context.load_cert_chain(self.certificate, self.key, _no_password)
        except OSError as error:
            description = f"tls.{part} is of no use: {error}"
            raise invalid_argument(FieldViolation(f"tls.{part}", description)) from error
        tls.prepare(context)
        return context


@dataclass(frozen=True)
class Security:
    """What all connections of a client have in common.

    Attributes:
        tls: For TCP; None for connections in the clear.
        token: What the server knows the client by.
    """

    tls: Tls | None = None
    token: Token | None = field(default=None, repr=False)


class Access:
    """How one server of a client is reached."""

    def __init__(self, security: Security, target: str, name: str | None = None) -> None:
        """Reads nothing yet.

        Args:
            security: Of the client.
            target: The server's address.
            name: The host's name that the address was found by, where the target does not have it.
        """
        self._tls = None if target.startswith(_LOCAL_SCHEMES) else security.tls
        self._token = security.token
        self._target = target
        place = host_and_port(target)
        self._expected = name if self._tls is None else self._tls.server_name or name
        self._server_hostname = self._expected or (place[0] if place else "")

    def channel(self, options: list[ChannelOption]) -> grpc.Channel:
        """A channel of grpcio with these options."""
        own = self._tls
        if own is None:
            return grpc.insecure_channel(self._target, options)
        credentials = grpc.ssl_channel_credentials(
            _system_authorities() if own.ca is None else _read("tls.ca", own.ca),
            None if own.key is None else _read("tls.key", own.key),
            None if own.certificate is None else _read("tls.certificate", own.certificate),
        )
        override = [("grpc.ssl_target_name_override", self._expected)] if self._expected else []
        return grpc.secure_channel(self._target, credentials, [*override, *options])

    def secured(self, sock: socket.socket) -> socket.socket:
        """A connection to the server's own TCP port, with TLS where there is to be some.

        Raises:
            OSError: The server is not who it should be, or wants another client.
        """
        return sock if self._tls is None else self._context.wrap_socket(sock, server_hostname=self._server_hostname)

    @functools.cached_property
    def _context(self) -> ssl.SSLContext:
        assert self._tls is not None
        return self._tls.context()

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What every call says of the client."""
        return () if self._token is None else (("authorization", self.authorization()),)

    def authorization(self) -> str:
        """The value of the header that has the token; empty where there is none.

        Raises:
            InvalidArgumentError: The token cannot be read, or cannot be in a header.
        """
        if self._token is None:
            return ""
        if isinstance(self._token, str):
            token = self._token
        elif callable(self._token):
            token = self._token()
        else:
            token = _read("token", self._token).decode(errors="replace").strip()
        return f"Bearer {_checked(token)}"


OPEN = Access(Security(), "")
"""In the clear, and without a token."""


def check_security(targets: list[str], tls: Tls | bool, token: Token | None, insecure: bool) -> Security:
    """The arguments of a client, if they go together."""
    if not isinstance(tls, Tls | bool):
        raise TypeError(f"tls must be a bool or a bngrad.Tls, not {type(tls).__name__}")
    if token is not None and not isinstance(token, str | os.PathLike) and not callable(token):
        raise TypeError(f"token must be a str, a path or a callable, not {type(token).__name__}")
    if isinstance(token, str):
        _checked(token)
    if token is not None and not tls and not insecure:
        for target in targets:
            if not _is_local(target):
                raise invalid_argument(FieldViolation("token", _PLAIN.format(target)))
    return Security((tls if isinstance(tls, Tls) else Tls()) if tls else None, token)


def _checked(token: str) -> str:
    """The token, if a header can have it; it is told to nobody, also not in an error."""
    if not isinstance(token, str) or not token or not token.isascii() or not token.isprintable() or " " in token:
        description = "token must be printable ASCII without blanks, and not empty"
        raise invalid_argument(FieldViolation("token", description))
    return token


def _read(field: str, path: str | os.PathLike[str]) -> bytes:
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:  # a ValueError is for what no path can have
        raise invalid_argument(FieldViolation(field, f"{field} must be a file that can be read: {error}")) from error


def _system_authorities() -> bytes | None:
    """The authorities that the system trusts; None, for grpcio's own, where they are in no one file."""
    path = ssl.get_default_verify_paths().cafile
    return None if path is None else Path(path).read_bytes()


def _no_password() -> str:
    raise OSError("the private key must not be encrypted")


def _is_local(target: str) -> bool:
    """Whether what is sent to a target stays on this host."""
    place = host_and_port(target)
    if place is None:
        return target.startswith(_LOCAL_SCHEMES)
    try:
        return ipaddress.ip_address(place[0]).is_loopback
    except ValueError:
        return place[0] == "localhost"
