"""Limits the time of uploads and downloads, since they hold memory that other requests wait for."""

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
_CHECK_INTERVAL_S = 0.25
_GRACE_S = 1.0
"""Beyond the deadline of a call, so that a client that is still there ends the call itself, and knows why."""


class TransferWatchdog:
    """The transfers in progress, and the thread that aborts the calls of those that take too long."""

    def __init__(self, timeout_s: float) -> None:
        """Allows a transfer ``timeout_s``, and in addition a second for each megabit."""
        self._timeout_s = timeout_s
        self._overdue_at: dict[RpcContext, float] = {}
        self._mutex = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="transfer-watchdog", daemon=True)
        self._thread.start()

    @contextmanager
    def watched(self, nbytes: int, rpc: RpcContext) -> Iterator[None]:
        """Aborts a call if the block, which transfers this many bytes, exceeds its time or the call's deadline."""
        overdue_at = time.monotonic() + self._timeout_s + nbytes / _SLOWEST_BYTES_PER_S
        if rpc.deadline is not None:
            overdue_at = min(overdue_at, rpc.deadline + _GRACE_S)
        with self._mutex:
            self._overdue_at[rpc] = overdue_at
        try:
            yield
        finally:
            with self._mutex:
                self._overdue_at.pop(rpc, None)

    def close(self) -> None:
        """Ends the thread."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(_CHECK_INTERVAL_S):
            now = time.monotonic()
            with self._mutex:
                late = [rpc for rpc, overdue_at in self._overdue_at.items() if overdue_at <= now]
                for rpc in late:
                    del self._overdue_at[rpc]
            for rpc in late:
                logger.info("closing the connection of %s: its transfer takes too long", rpc.client)
                rpc.abort()
