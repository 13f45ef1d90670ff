"""The server that a command talks to: its address, and how it is reached."""

from __future__ import annotations

import functools
import os
import re
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    import grpc

    import bngrad

Command = TypeVar("Command", bound=Callable[..., Any])

_HOST_AND_PORT = re.compile(r"(\[[^\]]+\]|[^:/\[\]]+):(\d{1,5})")
_HEALTH_METHOD = "/grpc.health.v1.Health/Check"
_SERVING = b"\x08\x01"
"""A ``grpc.health.v1.HealthCheckResponse`` that says SERVING."""


class TargetError(click.ClickException):
    """The server cannot be reached, or does not do what it should; the message says what to do about it."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server, as the options of a command describe it.

    Attributes:
        address: ``HOST:PORT`` or ``unix:PATH``.
        timeout_s: How long a call may take, in seconds.
    """

    address: str
    timeout_s: float

    @contextmanager
    def client(self, **arguments: Any) -> Iterator[bngrad.Client]:
        """A client, for the length of a ``with`` block; further arguments are those of `bngrad.Client`.

        Raises:
            TargetError: What is done in the block ended with an error of the client, which is the ``__cause__``.
        """
        import bngrad  # noqa: PLC0415 - it takes longer than asking for the server's health

        try:
            with bngrad.Client(self.address, timeout=self.timeout_s, **arguments) as client:
                yield client
        except bngrad.BngradError as error:
            raise TargetError(str(error)) from error

    def channel(self) -> grpc.Channel:
        """A channel for calls that are none of an op."""
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # What goes wrong, the command says.
        import grpc  # noqa: PLC0415 - the variable must be set before

        return grpc.insecure_channel(self.address, [("grpc.enable_http_proxy", 0)])

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
        self.connect()
        with self.channel() as channel:
            import grpc  # noqa: PLC0415 - the channel has imported it

            check: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(_HEALTH_METHOD)
            try:
                return check(b"", timeout=self.timeout_s) == _SERVING
            except grpc.RpcError as error:
                raise TargetError(self._explained(error)) from error

    def check_serving(self) -> None:
        """Makes sure that the server takes requests.

        Raises:
            TargetError: It does not.
        """
        if not self.is_serving():
            raise TargetError(
                f"{self.address} is NOT_SERVING: no worker is ready. A server that has just started may compile for a "
                "minute; the log of another one says why its workers ended."
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
            if self._speaks_tls():
                return f"{self.address} speaks TLS, and this command did not"
            return f"{self.address} is no gRPC server: {details}"
        return f"{self.address} answered {code}: {details}"


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
        @functools.wraps(command)
        def wrapped(address: str, timeout_s: float, **others: Any) -> Any:
            return command(Target(address, timeout_s), **others)

        return wrapped  # type: ignore[return-value]

    return decorate
