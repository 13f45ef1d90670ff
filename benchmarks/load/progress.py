"""A line on the terminal with the current step and its remaining time."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Iterator

_CLEAR_LINE = "\r\x1b[K"


class Progress:
    """Shows progress on stderr if that is a terminal."""

    def __init__(self) -> None:
        self._what = ""
        self._seconds = math.nan
        self._start = 0.0

    @contextlib.contextmanager
    def of(self, what: str, seconds: float = 0) -> Iterator[None]:
        """Shows a step during the block; ``seconds`` is its expected duration, 0 if unknown."""
        self._what, self._seconds, self._start = what, seconds, time.monotonic()
        self.show()
        try:
            yield
        finally:
            self._say("")

    def show(self) -> None:
        of = f" of {self._seconds:.0f}" if self._seconds else ""
        self._say(f"{self._what}: {time.monotonic() - self._start:.0f}{of} s")

    def _say(self, text: str) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(_CLEAR_LINE + text)
            sys.stderr.flush()
