"""Uploads and downloads: one that takes too long is cut off, since it holds memory that others wait for."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from bngrad_server.rpc_context import RpcContext

logger = logging.getLogger(__name__)

_SLOWEST_BYTES_PER_S = 1 << 17
"""A megabit a second."""
_LOOK_S = 0.25
_GRACE_S = 1.0
"""For callers whose deadline has passed: one that lives ends its call itself, and is to learn why it ended."""


class TransferWatchdog:
    """The transfers that are under way, and the thread that looks after them."""

    def __init__(self, timeout_s: float) -> None:
        """Makes it with no transfer.

        Args:
            timeout_s: How long one may take, in seconds, beside what its bytes take at a megabit a second.
        """
        self._timeout_s = timeout_s
        self._overdue_at: dict[RpcContext, float] = {}
        self._mutex = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._look, name="transfers", daemon=True)
        self._thread.start()

    @contextmanager
    def watched(self, nbytes: int, caller: RpcContext) -> Iterator[None]:
        """Hangs up on a caller whose transfer of so many bytes takes longer than it may, or than the caller waits."""
        overdue_at = time.monotonic() + self._timeout_s + nbytes / _SLOWEST_BYTES_PER_S
        if caller.deadline is not None:
            overdue_at = min(overdue_at, caller.deadline + _GRACE_S)
        with self._mutex:
            self._overdue_at[caller] = overdue_at
        try:
            yield
        finally:
            with self._mutex:
                self._overdue_at.pop(caller, None)

    def close(self) -> None:
        """Looks after none any longer."""
        self._closing.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._closing.wait(_LOOK_S):
            now = time.monotonic()
            with self._mutex:
                late = [caller for caller, overdue_at in self._overdue_at.items() if overdue_at <= now]
                for caller in late:
                    del self._overdue_at[caller]
            for caller in late:
                logger.info("hanging up on %s: its transfer takes too long", caller.client)
                caller.abort()
