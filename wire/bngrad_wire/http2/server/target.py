"""What the owner of a lane waits to have filled with DATA, straight from the socket."""

from __future__ import annotations


class Target:
    """Memory that the thread of an event loop fills, and another one waits for.

    Attributes:
        rest: What is not filled yet; empty once nothing more will be, as other DATA or the end of the call came before.
        filled: How many bytes are.
    """

    __slots__ = ("filled", "rest")

    def __init__(self, memory: memoryview) -> None:
        self.rest = memory
        self.filled = 0

    def advance(self, nbytes: int) -> None:
        """Takes note that the next bytes are filled."""
        self.filled += nbytes
        self.rest = self.rest[nbytes:]

    def close(self) -> None:
        """Fills nothing more."""
        self.rest = memoryview(b"")
