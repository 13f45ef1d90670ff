"""The server that a command talks to: its address, and how it is reached."""

from __future__ import annotations

import functools
import re
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from bngrad_wire.addresses import is_local

if TYPE_CHECKING:
    import grpc

    import bngrad

Command = TypeVar("Command", bound=Callable[..., Any])

_HOST_AND_PORT = re.compile(r"(\[[^\]]+\]|[^:/\[\]]+):(\d{1,5})")
_HEALTH_METHOD = "/grpc.health.v1.Health/Check"
_SERVING = b"\x08\x01"
"""A ``grpc.health.v1.HealthCheckResponse`` that says SERVING."""
_TLS_HINTS = {
    "WRONG_VERSION_NUMBER": "it speaks none, so leave out the options of TLS: ",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not good for the authorities known here, see --tls-ca: ",
    "security handshaker": "--tls-ca, --tls-certificate or --tls-key has nothing of use: ",
}


class TargetError(click.ClickException):
    """The server cannot be reached, or does not do what it should; the message says what to do about it."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server, as the options of a command describe it.

    Attributes:
        address: ``HOST:PORT`` or ``unix:PATH``.
        timeout_s: How long a call may take, in seconds.
        tls: Whether to speak TLS.
        tls_ca: The authorities to know the server by; None for those that the system trusts. Files, as the next ones.
        tls_certificate: The certificate to show.
        tls_key: Its key.
        token_file: The token to show.
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
        """A client, for the length of a ``with`` block; further arguments are those of `bngrad.Client`.

        Raises:
            TargetError: What is done in the block ended with an error of the client, which is the ``__cause__``.
        """
        import bngrad  # noqa: PLC0415 - it takes longer than asking for the server's health

        try:
            tls = bngrad.Tls(self.tls_ca, self.tls_certificate, self.tls_key) if self.tls else False
            arguments |= {"timeout": self.timeout_s, "tls": tls, "token": self.token_file}
            with bngrad.Client(self.address, **arguments) as client:
                yield client
        except bngrad.BngradError as error:
            raise TargetError(str(error)) from error

    def channel(self) -> grpc.Channel:
        """A channel for calls that are none of an op."""
        import grpc  # noqa: PLC0415 - a command that is written wrongly is refused sooner without

        options = [("grpc.enable_http_proxy", 0)]
        if not self.tls or self.address.startswith("unix:"):
            return grpc.insecure_channel(self.address, options)
        files = (self.tls_ca, self.tls_key, self.tls_certificate)
        return grpc.secure_channel(self.address, grpc.ssl_channel_credentials(*map(_read, files)), options)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What calls on the channel say of the caller.

        Raises:
            TargetError: The token would travel in the clear, or cannot be read.
        """
        token = _read(self.token_file)
        if token is None:
            return ()
        if not self.tls and not is_local(self.address):
            raise TargetError(f"the token would travel unencrypted to {self.address}: give --tls or --tls-ca as well")
        return (("authorization", f"Bearer {token.decode(errors='replace').strip()}"),)

    def connect(self) -> None:
        """Makes sure that somebody listens there: the system knows better than gRPC what is wrong if not.

        Raises:
            TargetError: Nobody can be reached.
        """
        try:
            with self._connected():
                pass
        except TimeoutError as error:
            raise TargetError(f"{self.address} does not answer within {self.timeout_s:g} s: is it filtered?") from error
        except socket.gaierror as error:
            raise TargetError(f"{self.address} names no host that is known here: {error.strerror}") from error
        except ConnectionRefusedError as error:
            raise TargetError(f"nobody listens on {self.address}: is `bngrad serve` running there?") from error
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise TargetError(f"{self.address} cannot be reached: {reason}") from error

    def is_serving(self) -> bool:
        """Whether the server says that it takes requests.

        Raises:
            TargetError: It does not say.
        """
        metadata = self.metadata()
        self.connect()
        with self.channel() as channel:
            import grpc  # noqa: PLC0415 - the channel has imported it

            check: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(_HEALTH_METHOD)
            try:
                return check(b"", timeout=self.timeout_s, metadata=metadata) == _SERVING
            except grpc.RpcError as error:
                raise TargetError(self._explained(error)) from error

    def check_serving(self) -> None:
        """Makes sure that the server takes requests.

        Raises:
            TargetError: It does not.
        """
        if not self.is_serving():
            raise TargetError(
                f"{self.address} is NOT_SERVING: no worker is ready. A server that has just started may compile for "
                "some minutes; the log of another one says why its workers ended."
            )

    def _connected(self) -> socket.socket:
        if self.address.startswith("unix:"):
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(self.timeout_s)
            try:
                connection.connect(self.address.removeprefix("unix:"))
            except BaseException:
                connection.close()
                raise
            return connection
        host, _, port = self.address.rpartition(":")
        return socket.create_connection((host.strip("[]"), int(port)), self.timeout_s)

    def _speaks_tls(self) -> bool:
        context = ssl.create_default_context()
        context.check_hostname = False  # Whoever it is, it is not told anything.
        context.verify_mode = ssl.CERT_NONE
        try:
            with self._connected() as connection, context.wrap_socket(connection):
                return True
        except OSError:
            return False

    def _explained(self, error: grpc.RpcError) -> str:
        # What a channel raises is a grpc.Call too.
        code, details = error.code().name, error.details()
        if code == "UNIMPLEMENTED":
            return f"{self.address} is a gRPC server, but not one of bngrad: {details}"
        if code == "DEADLINE_EXCEEDED":
            return f"{self.address} does not answer within {self.timeout_s:g} s: it hangs, or is no gRPC server"
        if code == "UNAVAILABLE":
            return self._explained_unavailable(details)
        what_to_do = ""
        if code == "UNAUTHENTICATED":
            what_to_do = f"; that of {self.token_file} is not" if self.token_file else "; give --token-file"
        return f"{self.address} answered {code}: {details}{what_to_do}"

    def _explained_unavailable(self, details: str | None) -> str:
        if self.tls:
            otherwise = "" if self.tls_certificate else "if it asks for certificates, give --tls-certificate: "
            hint = next((hint for sign, hint in _TLS_HINTS.items() if sign in str(details)), otherwise)
            return f"{self.address} is not reached by TLS: {hint}{details}"
        if self._speaks_tls():
            return f"{self.address} speaks TLS, and this command did not: give --tls or --tls-ca"
        return f"{self.address} is no gRPC server: {details}"


def _read(path: Path | None) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError as error:
        raise TargetError(f"{path} cannot be read: {error.strerror}") from error


def _address(context: click.Context, parameter: click.Parameter, value: str) -> str:
    found = _HOST_AND_PORT.fullmatch(value)
    is_port = found is not None and 0 < int(found[2]) < 2**16
    if not (is_port or (value.startswith("unix:") and value != "unix:")):
        raise click.BadParameter(f"it should be HOST:PORT or unix:PATH, not {value!r}")
    return value


def with_target(default_timeout_s: float) -> Callable[[Command], Command]:
    """Gives a command a `Target`, as its first argument, and the options that make one.

    Args:
        default_timeout_s: How long a call may take where --timeout does not say, in seconds.
    """

    def decorate(command: Command) -> Command:
        @click.argument("address", metavar="[TARGET]", default="localhost:50051", callback=_address)
        @click.option(
            "--timeout",
            "timeout_s",
            type=click.FloatRange(min=0, min_open=True),
            default=default_timeout_s,
            show_default=True,
            metavar="SECONDS",
            help="How long a call may take.",
        )
        @click.option("--tls", is_flag=True, help="Speak TLS; any of the next three says so too.")
        @_file_option(
            "--tls-ca", "Authorities to know the server by, a PEM file, instead of those that the system trusts."
        )
        @_file_option("--tls-certificate", "Certificate to show, a PEM file, for servers that ask for one.")
        @_file_option("--tls-key", "Its private key, a PEM file.")
        @_file_option("--token-file", "File that has the token to show.")
        @functools.wraps(command)
        def wrapped(address: str, timeout_s: float, **others: Any) -> Any:
            files = {name: others.pop(name) for name in ("tls_ca", "tls_certificate", "tls_key", "token_file")}
            if (files["tls_certificate"] is None) != (files["tls_key"] is None):
                raise click.UsageError("--tls-certificate and --tls-key need each other")
            tls = others.pop("tls") or files["tls_ca"] is not None or files["tls_key"] is not None
            return command(Target(address, timeout_s, tls, **files), **others)

        return wrapped  # type: ignore[return-value]

    return decorate


def _file_option(name: str, text: str) -> Callable[[Command], Command]:
    return click.option(name, type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help=text)
