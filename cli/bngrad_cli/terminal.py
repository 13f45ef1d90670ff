"""The terminal that tables are printed to."""

from __future__ import annotations

from rich.console import Console

MIN_COLUMNS = 80
"""The width of tables in a narrower terminal, which breaks their lines: rich would cut numbers."""


def wide_console() -> Console:
    """Returns a console of the terminal's width, but at least `MIN_COLUMNS`."""
    console = Console()
    console.width = max(console.width, MIN_COLUMNS)
    return console
