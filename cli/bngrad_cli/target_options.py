"""The argument and options by which a command's user names a server."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from bngrad_cli.target import Target
from bngrad_wire.addresses import MAX_PORT, host_and_port, unix_path
from bngrad_wire.limits import LONGEST_S

Command = TypeVar("Command", bound=Callable[..., Any])


class Seconds(click.types.FloatParamType):
    """A duration of at most a week, above 0 unless another least one is given."""

    def __init__(self, least: float | None = None) -> None:
        self._least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """See `click.ParamType`."""
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not (number > 0 if self._least is None else number >= self._least) or number > LONGEST_S:
            least = "above 0" if self._least is None else f"at least {self._least:g}"
            self.fail(f"it should be a number of seconds, {least} and at most {LONGEST_S}, not {value!r}", param, ctx)
        return number


def _address(context: click.Context, parameter: click.Parameter, value: str) -> str:
    place = host_and_port(value)
    is_valid = bool(unix_path(value)) if place is None else 0 < place[1] <= MAX_PORT
    if not is_valid:
        expected = f"it should be HOST:PORT or unix:PATH, with a port of at most {MAX_PORT}"
        raise click.BadParameter(f"{expected}, not {value!r}", param_hint="TARGET")
    return value


def with_target(default_timeout_s: float) -> Callable[[Command], Command]:
    """Adds the argument and options of a `Target`, which the command gets as its first argument.

    Args:
        default_timeout_s: The default of --timeout, in seconds.
    """

    def decorate(command: Command) -> Command:
        @click.argument("address", metavar="[TARGET]", default="localhost:50051", callback=_address)
        @click.option(
            "--timeout",
            "timeout_s",
            type=Seconds(),
            default=default_timeout_s,
            show_default=True,
            metavar="SECONDS",
            help="Time limit of each call.",
        )
        @click.option("--tls", is_flag=True, help="Use TLS; implied by the next three options.")
        @_file_option(
            "--tls-ca", "Authorities for the server's certificate, a PEM file, instead of those that the system trusts."
        )
        @_file_option("--tls-certificate", "Client certificate, a PEM file, for servers that ask for one.")
        @_file_option("--tls-key", "Private key of the client certificate, a PEM file.")
        @_file_option("--token-file", "File with the token to send.")
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
    return click.option(name, type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE", help=text)
