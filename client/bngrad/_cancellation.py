"""How a caller that has lost interest ends a call that runs in another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Cancellation:
    """Ends what runs in the blocks of `calls`, now and later, once `cancel` was called.

    Attributes:
        only_by_close: Whether nobody but the client's own `close` cancels.
        cancelled: Whether somebody did.
    """

    def __init__(self, *, only_by_close: bool = False) -> None:
        self.only_by_close = only_by_close
        self.cancelled = False
        self._mutex = threading.Lock()
        self._callback: Callable[[], object] | None = None

    def cancel(self) -> None:
        """Ends the call; may be called from any thread."""
        with self._mutex:
            self.cancelled = True
            # Within the mutex, so that it cannot meet what comes after the block.
            if self._callback is not None:
                self._callback()

    @contextmanager
    def calls(self, callback: Callable[[], object]) -> Iterator[None]:
        """Has `cancel` call back during the block, or does so at once if it was called before."""
        with self._mutex:
            self._callback = callback
            cancelled = self.cancelled
        if cancelled:
            callback()
        try:
            yield
        finally:
            with self._mutex:
                self._callback = None

    def sleep(self, seconds: float) -> None:
        """Waits, but not beyond `cancel`."""
        woken = threading.Event()
        with self.calls(woken.set):
            woken.wait(min(seconds, threading.TIMEOUT_MAX))
