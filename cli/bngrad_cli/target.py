"""The server that a command talks to: its address, TLS and token."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bngrad_wire.addresses import grpcio_address, host_and_port, is_local, unix_path
from bngrad_wire.token_format import SCHEME, is_sendable

if TYPE_CHECKING:
    import grpc
    from rich.console import Console

    import bngrad

_COMPILING_TIMEOUT_S, _ASK_EVERY_S = 300.0, 0.2
_HEALTH_METHOD = "/grpc.health.v1.Health/Check"
_SERVING = b"\x08\x01"
"""A ``grpc.health.v1.HealthCheckResponse`` with SERVING."""
_TLS_HINTS = {
    "WRONG_VERSION_NUMBER": "it speaks none, so leave out the options of TLS: ",
    "certificate has expired": "its certificate has expired, or the clock here is wrong: ",
    "certificate is not yet valid": "its certificate is not yet valid, or the clock here is wrong: ",
    "CERTIFICATE_VERIFY_FAILED": "no authority known here has signed its certificate, see --tls-ca: ",
    "Hostname Verification Check failed": "its certificate is for other names: ",
    "security handshaker": "--tls-ca, --tls-certificate or --tls-key has nothing of use: ",
}


class TargetError(click.ClickException):
    """The server cannot be reached, or does not work; the message says what to do."""


class TokenError(TargetError):
    """The token is of no use there, or lacks: to try again does not help."""


class NotOfferedError(Exception):
    """The server does not offer something optional; the message says why."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server, as the argument and options of a command describe it.

    Attributes:
        address: ``HOST:PORT`` or ``unix:PATH``.
        timeout_s: The time limit of each call, in seconds.
        tls: Whether to use TLS.
        tls_ca: The file of authorities for the server's certificate; None for those that the system trusts.
        tls_certificate: The file of the client's certificate.
        tls_key: The file of its key.
        token_file: The file of the client's token.
    """

    address: str
    timeout_s: float
    tls: bool = False
    tls_ca: Path | None = None
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    token_file: Path | None = None

    @contextmanager
    def client(self, **arguments: Any) -> Iterator[bngrad.Client]:
        """Opens a client for a ``with`` block; further arguments are those of `bngrad.Client`.

        Raises:
            TargetError: The block raised an error of the client, which is the ``__cause__``.
        """
        import bngrad  # noqa: PLC0415 - its import takes longer than asking for the server's health

        try:
            tls = bngrad.Tls(self.tls_ca, self.tls_certificate, self.tls_key) if self.tls else False
            arguments |= {"timeout": self.timeout_s, "tls": tls, "token": self.token_file}
            with bngrad.Client(self.address, **arguments) as client:
                yield client
        except bngrad.UnauthenticatedError as error:
            raise TargetError(f"{self.address} answered UNAUTHENTICATED: {self._which_token()}") from error
        except bngrad.BngradError as error:
            raise TargetError(str(error)) from error

    def channel(self) -> grpc.Channel:
        """Opens a channel for calls that are not of an op."""
        import grpc  # noqa: PLC0415 - a wrong command line is refused faster without it

        options = [("grpc.enable_http_proxy", 0)]
        if not self.tls or self.address.startswith("unix:"):
            return grpc.insecure_channel(grpcio_address(self.address), options)
        files = (self.tls_ca, self.tls_key, self.tls_certificate)
        return grpc.secure_channel(self.address, grpc.ssl_channel_credentials(*map(_read, files)), options)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Returns the metadata of calls on the channel.

        Raises:
            TargetError: The token cannot be read.
            TokenError: It would travel unencrypted, or is none.
        """
        content = _read(self.token_file)
        if content is None:
            return ()
        token = content.decode(errors="replace").strip()
        if not is_sendable(token):
            expected = "one token, as `bngrad token new` prints it, without blanks or further lines"
            raise TokenError(f"{self.token_file}, the file of --token-file, should hold {expected}")
        if not self.tls and not is_local(self.address):
            raise TokenError(f"the token would travel unencrypted to {self.address}: give --tls or --tls-ca as well")
        return (("authorization", f"{SCHEME}{token}"),)

    def connect(self) -> None:
        """Checks that a connection can be made; the system's errors say more than gRPC's.

        Raises:
            TargetError: It cannot.
        """
        try:
            with self._connected():
                pass
        except TimeoutError as error:
            raise TargetError(f"{self.address} does not answer within {self.timeout_s:g} s: is it filtered?") from error
        except socket.gaierror as error:
            raise TargetError(f"{self.address} names no host that is known here: {error.strerror}") from error
        except ConnectionRefusedError as error:
            raise TargetError(f"nothing listens on {self.address}: is `bngrad serve` running there?") from error
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error  # too long a path has none
            raise TargetError(f"{self.address} cannot be reached: {reason}") from error

    def is_serving(self) -> bool:
        """Asks the server whether it takes requests.

        Raises:
            TargetError: It does not answer that.
            TokenError: It does not accept the token.
        """
        metadata = self.metadata()
        self.connect()
        with self.channel() as channel:
            import grpc  # noqa: PLC0415 - the channel has imported it

            check: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(_HEALTH_METHOD)
            try:
                return check(b"", timeout=self.timeout_s, metadata=metadata) == _SERVING
            except grpc.RpcError as error:
                is_token = error.code() is grpc.StatusCode.UNAUTHENTICATED
                raise (TokenError if is_token else TargetError)(self._explained(error)) from error

    def check_serving(self) -> None:
        """Checks that the server takes requests.

        Raises:
            TargetError: It does not.
            TokenError: It does not accept the token.
        """
        if not self.is_serving():
            raise TargetError(
                f"{self.address} is NOT_SERVING: no worker is ready. A server that has just started needs some "
                "seconds, with a GPU perhaps minutes; otherwise its log says why its workers ended."
            )

    def _connected(self) -> socket.socket:
        path, place = unix_path(self.address), host_and_port(self.address)
        if path is None:
            assert place is not None
            return socket.create_connection(place, self.timeout_s)
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(self.timeout_s)
        try:
            connection.connect(path)
        except BaseException:
            connection.close()
            raise
        return connection

    def _speaks_tls(self) -> bool:
        context = ssl.create_default_context()
        context.check_hostname = False  # nothing is sent, so any certificate will do
        context.verify_mode = ssl.CERT_NONE
        try:
            with self._connected() as connection, context.wrap_socket(connection):
                return True
        except OSError:
            return False

    def _explained(self, error: grpc.RpcError) -> str:
        code, details = error.code().name, error.details()  # a channel's errors are grpc.Call too
        if code == "UNIMPLEMENTED":
            return f"{self.address} does not know the health check, so it is no server of bngrad: {details}"
        if code == "DEADLINE_EXCEEDED":
            return f"{self.address} does not answer within {self.timeout_s:g} s: it hangs, or is no gRPC server"
        if code == "UNAVAILABLE":
            return self._explained_unavailable(details)
        if code == "UNAUTHENTICATED":
            details = self._which_token()
        return f"{self.address} answered {code}: {details}"

    def _which_token(self) -> str:
        given = f"that of {self.token_file} is not" if self.token_file else "give --token-file"
        return f"a valid token is needed; {given}"

    def _explained_unavailable(self, details: str | None) -> str:
        if self.tls:
            otherwise = "if it asks for certificates, give --tls-certificate: "
            if self.tls_certificate:
                otherwise = f"it may know no authority that has signed {self.tls_certificate}: "
            hint = next((hint for sign, hint in _TLS_HINTS.items() if sign in str(details)), otherwise)
            return f"{self.address} is not reached by TLS: {hint}{details}"
        if self._speaks_tls():
            return f"{self.address} speaks TLS, and this command did not: give --tls or --tls-ca"
        return f"{self.address} is no gRPC server: {details}"


def wait_until_compiled(client: bngrad.Client, console: Console) -> None:
    """Waits, and says so, until the kernels of a client's first order are compiled; at most five minutes."""
    until = time.monotonic() + _COMPILING_TIMEOUT_S
    if not (names := _compiling(client)):
        return
    console.print("NumPy computes, more slowly, until the kernels are compiled.")
    with console.status("") as status:
        while names and time.monotonic() < until:
            status.update(f"still to be compiled: {', '.join(names)}")
            time.sleep(_ASK_EVERY_S)
            names = _compiling(client)


def _compiling(client: bngrad.Client) -> list[str]:
    return [name for name in client.server_info().compiling if name.endswith("-1")]


def _read(path: Path | None) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError as error:
        raise TargetError(f"{path} cannot be read: {error.strerror}") from error
