"""The terminal that tables and screens are printed to."""

from __future__ import annotations

import signal
import sys
from typing import NoReturn

from rich.console import Console

MIN_COLUMNS = 80
"""The width of tables in a narrower terminal, which breaks their lines: rich would cut numbers."""


def wide_console() -> Console:
    """Returns a console of the terminal's width, but at least `MIN_COLUMNS`."""
    console = Console()
    console.width = max(console.width, MIN_COLUMNS)
    return console


def exit_on_sigterm() -> None:
    """Has SIGTERM end the process by an exception, so that it leaves the terminal as it was, and no child process."""

    def end(number: int, _: object) -> NoReturn:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)
