"""TLS and tokens: how a client authenticates its server, and how the server authenticates the client."""

from __future__ import annotations

import functools
import os
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import grpc

from bngrad._deadline import Cancellation
from bngrad._errors import FieldViolation, invalid_argument
from bngrad._shared_memory.lease import shut_down
from bngrad._validation import LOCAL, ChannelOption, host_and_port_of
from bngrad_wire.addresses import format_host_port, grpcio_address, is_local
from bngrad_wire.http2.sockets import sigpipe, tls
from bngrad_wire.token_format import SCHEME, is_sendable

Token: TypeAlias = str | os.PathLike[str] | Callable[[], str]
_LOCAL_SCHEMES = ("unix:", "unix-abstract:")
_HASHED = "[0-9a-f]" * 8 + ".[0-9]*"
"""How OpenSSL names the certificates in a directory of authorities."""
_PLAIN = "the token would travel unencrypted to {}: give tls as well, or insecure=True if the network is protected"


@dataclass(frozen=True)
class Tls:
    """How a client checks the certificates of its servers, and its own certificate, if any.

    The files are read when a connection to a server is first made, so a new client sees new files.

    Attributes:
        ca: A PEM file with the authorities to trust; None for those that the system trusts.
        certificate: A PEM file with the client's own certificate, for servers that ask for one.
        key: A PEM file with the certificate's private key, without a password.
        server_name: The name that the servers' certificates must have; None for the host of the target.
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
        """Makes a context of Python's ssl.

        Raises:
            InvalidArgumentError: A file cannot be used.
        """
        part = "ca"
        try:
            context = ssl.create_default_context(cafile=self.ca)
            part = "certificate"
            if self.certificate is not None:
                context.load_cert_chain(self.certificate, self.key, _no_password)
        except OSError as error:
            description = f"tls.{part} cannot be used: {error}"
            raise invalid_argument(FieldViolation(f"tls.{part}", description)) from error
        tls.prepare(context)
        return context


@dataclass(frozen=True)
class Security:
    """The security options of a client.

    Attributes:
        tls: The options of TLS on TCP; None for no TLS.
        token: What identifies the client to the server, if anything.
        insecure: Whether the token may be sent to other hosts without TLS.
    """

    tls: Tls | None = None
    token: Token | None = field(default=None, repr=False)
    insecure: bool = False


class Credentials:
    """The credentials for one server: TLS and the token."""

    def __init__(self, security: Security, target: str, name: str | None = None) -> None:
        """Reads nothing yet; ``name`` is the host name that the target was resolved from, None if it has the name."""
        self._security = security
        self._tls = None if target.startswith(_LOCAL_SCHEMES) else security.tls
        self._token = security.token
        self._target = target
        address = host_and_port_of(target)
        self._expected = name if self._tls is None else self._tls.server_name or name
        self._server_hostname = self._expected or (address[0] if address else "")

    def for_host(self, host: str) -> Credentials | None:
        """Returns the credentials for a host that the server names; its own if that is empty.

        None if the token would travel unencrypted, which the caller allowed for this host at most.
        """
        if not host:
            return self
        address = format_host_port(host, 1)
        security = self._security
        if security.token is not None and security.tls is None and not security.insecure and not is_local(address):
            return None
        return Credentials(security, address)

    def channel(self, options: list[ChannelOption]) -> grpc.Channel:
        """Makes a channel of grpcio with these options."""
        own = self._tls
        if own is None:
            return grpc.insecure_channel(grpcio_address(self._target), options)
        credentials = grpc.ssl_channel_credentials(
            _system_authorities() if own.ca is None else _read("tls.ca", own.ca),
            None if own.key is None else _read("tls.key", own.key),
            None if own.certificate is None else _read("tls.certificate", own.certificate),
        )
        override = [("grpc.ssl_target_name_override", self._expected)] if self._expected else []
        return grpc.secure_channel(self._target, credentials, [*override, *options])

    def secured(self, sock: socket.socket, cancellation: Cancellation) -> socket.socket:
        """Returns a connection to the server's TCP port, encrypted if the client uses TLS.

        Raises:
            OSError: The handshake failed: a certificate was refused, by the client or by the server, or the call was
                cancelled.
        """
        if self._tls is None:
            return sock
        hostname = self._server_hostname
        secured = self._context.wrap_socket(sock, server_hostname=hostname, do_handshake_on_connect=False)
        try:
            with sigpipe.held_back(), cancellation.calls(functools.partial(shut_down, secured)):
                secured.do_handshake()
        except BaseException:
            secured.close()
            raise
        return secured

    @functools.cached_property
    def _context(self) -> ssl.SSLContext:
        assert self._tls is not None
        return self._tls.context()

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Returns the metadata that identifies the client in every call."""
        return () if self._token is None else (("authorization", self.authorization()),)

    def authorization(self) -> str:
        """Returns the value of the ``authorization`` header; empty without a token.

        Raises:
            InvalidArgumentError: The token cannot be read, or has characters that a header cannot.
        """
        if self._token is None:
            return ""
        if isinstance(self._token, str):
            token = self._token
        elif callable(self._token):
            token = self._token()
        else:
            token = _read("token", self._token).decode(errors="replace").strip()
        return f"{SCHEME}{_checked(token)}"


NO_CREDENTIALS = Credentials(Security(), "")
"""Neither TLS nor a token."""


def check_security(targets: list[str], tls: Tls | bool, token: Token | None, insecure: bool) -> Security:
    """Returns the security options of a client if they are valid together."""
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
    return Security((tls if isinstance(tls, Tls) else Tls()) if tls else None, token, insecure)


def _checked(token: str) -> str:
    """Returns the token if a header can have it; errors do not show it."""
    if not isinstance(token, str) or not is_sendable(token):
        description = "token must be printable ASCII without blanks, and not empty"
        raise invalid_argument(FieldViolation("token", description))
    return token


def _read(field: str, path: str | os.PathLike[str]) -> bytes:
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:  # ValueError for a path with NUL
        raise invalid_argument(FieldViolation(field, f"{field} must be a file that can be read: {error}")) from error


def _system_authorities() -> bytes | None:
    """Returns the authorities that the system trusts, of a file and a directory; None, for grpcio's own, if none."""
    places = ssl.get_default_verify_paths()
    paths = [] if places.cafile is None else [Path(places.cafile)]
    if places.capath is not None:
        paths += filter(Path.is_file, Path(places.capath).glob(_HASHED))
    return b"\n".join(path.read_bytes() for path in paths) or None


def _no_password() -> str:
    raise OSError("the private key must not be encrypted")


def _is_local(target: str) -> bool:
    """Returns whether a target is on this host."""
    address = host_and_port_of(target)
    if target == LOCAL:
        return True
    return target.startswith(_LOCAL_SCHEMES) if address is None else is_local(format_host_port(*address))
