"""A clock that tests set, for code whose answers depend on the time; a busy machine does not move it."""

from __future__ import annotations


class Clock:
    """Stands in for the module `time`, or for `time.monotonic`.

    Attributes:
        now: What it shows, in seconds.
        tick_s: How far it goes on whenever it is read.
    """

    def __init__(self) -> None:
        self.now, self.tick_s = 1000.0, 0.0

    def monotonic(self) -> float:
        self.now += self.tick_s
        return self.now

    __call__ = monotonic
