"""The terminal that tables and screens are printed to."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn

from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    import bngrad

MIN_COLUMNS = 80
"""The width of tables in a narrower terminal, which breaks their lines: rich would cut numbers."""


def wide_console() -> Console:
    """Returns a console of the terminal's width, but at least `MIN_COLUMNS`."""
    console = Console()
    console.width = max(console.width, MIN_COLUMNS)
    return console


def plain_table(*columns: str, **options: Any) -> Table:
    """Returns an empty table with a line below its heads alone; the arguments are those of rich's table."""
    return Table(*columns, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, **options)


def print_lines(console: Console, lines: Iterable[str]) -> None:
    """Prints text as it is: nothing in it is markup, and long lines are left to the terminal."""
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def descriptions(server: bngrad.ServerInfo) -> str:
    """Returns what a server's devices are, each kind once."""
    return ", ".join(dict.fromkeys(device.description for device in server.devices))


def exit_on_sigterm() -> None:
    """Has SIGTERM end the process by an exception, so that it leaves the terminal as it was, and no child process."""

    def end(number: int, _: object) -> NoReturn:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)
