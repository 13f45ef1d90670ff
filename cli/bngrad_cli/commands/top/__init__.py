"""``bngrad top``: shows a server's activity in the terminal."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import signal
import sys
import termios
import time
import tty
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.segment import Segment, Segments
from rich.text import Text

from bngrad_cli.commands.top.screen import screen
from bngrad_cli.target_options import Seconds
from bngrad_cli.terminal import MIN_COLUMNS, exit_on_sigterm, wide_console
from bngrad_wire.addresses import MAX_PORT, host_and_port
from bngrad_wire.printable import printable

_TIMEOUT_S = 5.0
_SCHEMES = ("http://", "https://")
_HINT = "start the server with --http HOST:PORT, and give that address here"
_EXPLAINED = {421, 503}
"""The status codes with which the HTTP port says in a line why it does not answer."""
_MAX_LINE_NBYTES = 500
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Asks servers themselves, as the other commands do, whatever proxy the environment names."""


def _address(context: click.Context, parameter: click.Parameter, value: str) -> str:
    if not _is_address(value):
        expected = f"it should be HOST:PORT or http://HOST:PORT, with a port of at most {MAX_PORT}"
        raise click.BadParameter(f"{expected}, not {value!r}", param_hint="ADDRESS")
    return value


def _is_address(value: str) -> bool:
    if not value.startswith(_SCHEMES):
        place = host_and_port(value)
        return place is not None and 0 < place[1] <= MAX_PORT
    try:
        parts = urlsplit(value)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is no number, or too large
        return False


@click.command()
@click.argument("address", default="localhost:9464", callback=_address)
@click.option("--once", is_flag=True, help="Print the screen once, as where the output is no terminal.")
@click.option("--json", "as_json", is_flag=True, help="Print the server's status once, as JSON.")
@click.option(
    "--interval",
    type=Seconds(0.1),
    default=1,
    show_default=True,
    metavar="SECONDS",
    help="Time between updates, at least 0.1.",
)
def top(address: str, *, once: bool, as_json: bool, interval: float) -> None:
    """Shows a server's activity in the terminal.

    ADDRESS is the server's HTTP port, by default localhost:9464: the value of `bngrad serve --http`, as HOST:PORT or
    as a URL. The key q, or Ctrl-C, ends the command.
    """
    if once and as_json:
        raise click.UsageError("--once and --json exclude each other")
    exit_on_sigterm()
    console = Console()
    status = _status(address)
    if as_json:
        click.echo(json.dumps(status))
    elif once or not console.is_terminal or console.is_dumb_terminal:
        wide_console().print(screen(address, status))
    else:
        live = Live(_fitted(screen(address, status, columns=console.width), console), console=console, screen=True)
        with contextlib.suppress(KeyboardInterrupt), keys_pressed() as keys, contextlib.ExitStack() as stack:
            stack.callback(live.stop)  # also if a signal interrupts the start
            live.start(refresh=True)
            while not keys.wait_for_q(interval):
                live.update(_fitted(_update(address, console.width), console))


def _status(address: str) -> dict[str, Any]:
    url = address if address.startswith(_SCHEMES) else f"http://{address}"
    try:
        with _OPENER.open(f"{url.rstrip('/')}/status.json", timeout=_TIMEOUT_S) as answer:
            status: dict[str, Any] = json.load(answer)
        if not (isinstance(status, dict) and {"server", "points", "recent"} <= status.keys()):
            raise ValueError("it is JSON of another program")
    except urllib.error.HTTPError as error:
        with error:
            line = error.read(_MAX_LINE_NBYTES).decode(errors="replace").strip() if error.code in _EXPLAINED else ""
        said = printable(line) or f"{error.reason}; {_HINT}"
        raise click.ClickException(f"cannot read {url}/status.json: {said}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        is_other = isinstance(error, (ValueError, http.client.HTTPException))
        reason = getattr(error, "reason", None) or error
        reason = "it is not an HTTP port of bngrad" if is_other else getattr(reason, "strerror", None) or reason
        raise click.ClickException(f"cannot read {url}/status.json: {reason}; {_HINT}") from error
    return status


class _Keys:
    """The keys that are pressed while the screen is shown; none where the input is no terminal."""

    def __init__(self, fd: int | None, signals: int) -> None:
        self._fd = fd
        self._signals = signals

    def wait_for_q(self, seconds: float) -> bool:
        """Waits this long, or until q is pressed; returns whether it was."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            waited_for = [fd for fd in (self._fd, self._signals) if fd is not None]
            readable = select.select(waited_for, [], [], left)[0]
            if self._signals in readable:
                signal.raise_signal(os.read(self._signals, 1)[0])
            if self._fd in readable:
                key = os.read(self._fd, 1)
                if key in (b"q", b"Q"):
                    return True
                if not key:  # the terminal has gone
                    self._fd = None
        return False


@contextlib.contextmanager
def keys_pressed() -> Iterator[_Keys]:
    """Has the terminal pass on each key at once, during the block."""
    with _signals() as signals:
        if not _may_read_keys():
            yield _Keys(None, signals)
            return
        fd = sys.stdin.fileno()
        before = termios.tcgetattr(fd)
        try:
            tty.setcbreak(fd)
            yield _Keys(fd, signals)
        finally:
            termios.tcsetattr(fd, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _signals() -> Iterator[int]:
    """Yields a pipe that each signal writes its number to, during the block.

    Without it a signal just before a wait would not end the wait, and Python drops the exception of one amid a
    finaliser.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield reading
    finally:
        signal.set_wakeup_fd(before)
        os.close(writing)
        os.close(reading)


def _may_read_keys() -> bool:
    """Whether the input is a terminal that this process would not be stopped for reading from."""
    if not sys.stdin.isatty():
        return False
    try:
        return os.getpgrp() == os.tcgetpgrp(sys.stdin.fileno())
    except OSError:  # it is not the controlling terminal, which alone stops processes
        return True


def _fitted(content: RenderableType, console: Console) -> RenderableType:
    """Returns the content with the hint in the last line; cuts what does not fit above it."""
    height = console.size.height - 1
    options = console.options.update(width=max(console.width, MIN_COLUMNS), height=None)
    lines = console.render_lines(content, options)[:height]
    rest = [Segment.line()] * (height - len(lines))
    shown = Segments([segment for line in lines for segment in (*line, Segment.line())] + rest)
    return Group(shown, Text("q to quit", style="dim"))


def _update(address: str, columns: int) -> RenderableType:
    """Returns the screen, with the error if the server does not answer."""
    try:
        return screen(address, _status(address), columns=columns)
    except click.ClickException as error:
        return Panel(Text(error.message, style="red"), title=f"bngrad on {address}", width=columns)
