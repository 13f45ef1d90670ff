"""A message that was received whole, and what is counted for it."""

from __future__ import annotations

from collections.abc import Callable

from bngrad_wire.fields import Buffer


class ReceivedMessage:
    """A message, until its tensors have been copied.

    Attributes:
        data: Its bytes; empty after `release`.
    """

    __slots__ = ("_on_release", "data")

    def __init__(self, data: Buffer, on_release: Callable[[], object] | None = None) -> None:
        """Calls ``on_release`` once."""
        self.data: Buffer = data
        self._on_release = on_release

    def release(self) -> None:
        """Gives up the bytes, and what was counted for them."""
        self.data = b""
        on_release, self._on_release = self._on_release, None
        if on_release is not None:
            on_release()
