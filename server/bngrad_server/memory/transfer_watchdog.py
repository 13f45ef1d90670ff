"""Limits uploads and downloads, since they hold memory that other requests wait for.

A transfer that holds memory has to move: `_LEAST_BYTES_PER_S` on average, and so something every few seconds. Beyond
that, while a request of a client with less than its share of the memory waits for some, the slow transfers of clients
with more than their shares are ended, until what waits fits. Slow is a transfer that needs more than two seconds more
at the rate that it has shown. A client that loses a transfer so, or because it is too slow, may have less memory for
some time; see `bngrad_server.memory.lost_transfers`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager

from bngrad_server.errors import OverloadedError
from bngrad_server.memory.allocator import Allocator, Block
from bngrad_server.rpc_context import RpcContext

logger = logging.getLogger(__name__)

_LEAST_BYTES_PER_S = 1 << 17
"""A megabit a second."""
_WINDOW_S = 5.0
"""How long a transfer may stand still; never longer than the timeout."""
_CHECK_INTERVAL_S = 0.25
_PAUSE_S = 1.0
"""A look that is so late shows that this process was stopped meanwhile, or got no processor: no client is to blame."""
_RATE_INTERVAL_S = 1.0
_FIRST_INTERVAL_S = 0.5
"""After this time, a transfer has shown its rate if it is less than the least, since first bytes come at once."""
_SOON_S = 2.0
"""A transfer that ends within this time may do so."""
_GRACE_S = 1.0
"""Beyond the deadline of a call, so that a client that is still there ends the call itself, and knows why."""


class _Wait:
    """Something that has to end in time: the block whose context manager it is.

    Attributes:
        rpc: The call.
        due_at: When it has to end or, if it is a transfer, to have moved on.
        error: Why it was ended; None while it was not.
        stop: Ends it, from any thread.
    """

    error: Exception | None = None

    def __init__(
        self, watchdog: TransferWatchdog, rpc: RpcContext, timeout_s: float, stop: Callable[[], object]
    ) -> None:
        self._watchdog = watchdog
        self.rpc = rpc
        self.due_at = time.monotonic() + timeout_s
        self.stop = stop

    def __enter__(self) -> None:
        self._watchdog.add(self)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._watchdog.remove(self)

    def excuse(self, pause_s: float) -> None:
        """Takes no account of a time in which this process did nothing."""
        self.due_at += pause_s


class _Pause(_Wait):
    """A wait for the next request of a call, which may be over."""

    def end(self) -> None:
        """Ends the wait because the server stops."""
        self.error = CancelledError()
        self.rpc.traffic.interrupt()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Raises CancelledError, which tells the client that the server stops, if that has ended the wait."""
        super().__exit__(kind, error, traceback)
        if isinstance(self.error, CancelledError):
            self.rpc.traffic.resume()
            if isinstance(error, Exception):
                raise CancelledError from error


class _Transfer(_Wait):
    """A transfer that holds memory.

    Attributes:
        memory: Where it holds memory.
        block: The memory.
        left_nbytes: How much it has still to move.
        is_spare: Whether its memory is the first to be given up.
    """

    def __init__(
        self,
        watchdog: TransferWatchdog,
        nbytes: int,
        rpc: RpcContext,
        memory: Allocator,
        block: Block,
        window_s: float,
        stop: Callable[[], object],
        *,
        is_spare: bool = False,
    ) -> None:
        super().__init__(watchdog, rpc, window_s, stop)
        self.is_spare = is_spare
        self.memory = memory
        self.block = block
        self.left_nbytes = nbytes
        self._window_s = window_s
        self._end = rpc.traffic.moved + nbytes
        self._rates: tuple[float, float] | None = None  # in the last two intervals
        self._sampled_at, self._sampled_left = self.due_at - window_s, nbytes

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Raises why it was ended, in place of how the block found out, or although it has ended by itself."""
        super().__exit__(kind, error, traceback)
        if self.error is not None:
            self.rpc.traffic.resume()
            try:
                if error is None or isinstance(error, Exception):
                    raise self.error from error
            finally:
                self.error = None  # its traceback has this frame: a reference cycle

    def excuse(self, pause_s: float) -> None:
        super().excuse(pause_s)
        self._sampled_at += pause_s

    def measure(self, now: float) -> None:
        left_nbytes = max(self._end - self.rpc.traffic.moved, 0)
        gained_s = (self.left_nbytes - left_nbytes) / _LEAST_BYTES_PER_S
        self.due_at = min(self.due_at + gained_s, now + self._window_s)
        self.left_nbytes = left_nbytes
        interval_s = now - self._sampled_at
        rate = (self._sampled_left - left_nbytes) / max(interval_s, 1e-9)
        is_idle = self._rates is None and interval_s >= _FIRST_INTERVAL_S and rate < _LEAST_BYTES_PER_S
        if interval_s >= _RATE_INTERVAL_S or is_idle:
            self._rates = (rate if self._rates is None else self._rates[1], rate)
            self._sampled_at, self._sampled_left = now, left_nbytes

    @property
    def rest_s(self) -> float:
        """How long it will take at the rate that it has shown; 0 where it has not had the time to show any."""
        return 0.0 if self._rates is None else self.left_nbytes / max(*self._rates, 1e-9)


class TransferWatchdog:
    """The transfers in progress, and the thread that ends those that take too long."""

    def __init__(self, timeout_s: float, memories: Sequence[Allocator], *, limits_clients: bool) -> None:
        """Allows a client to keep the server waiting for ``timeout_s``, and less where that holds memory.

        Args:
            timeout_s: The time.
            memories: Where transfers may hold memory.
            limits_clients: Whether a client that lost a transfer is limited for some time. That is unjust where clients
                are not authenticated, since all programs of a host are one client then.
        """
        self._limits_clients = limits_clients
        self._timeout_s = timeout_s
        self._window_s = min(_WINDOW_S, timeout_s)
        self._memories = memories
        self._waits: set[_Wait] = set()
        self._mutex = threading.Lock()
        self._draining = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="transfer-watchdog", daemon=True)
        self._thread.start()

    def watched(self, nbytes: int, rpc: RpcContext) -> AbstractContextManager[None]:
        """Aborts a call if the block takes longer than the timeout and a second for each megabit of ``nbytes``.

        For what holds no memory that others wait for.
        """
        return _Wait(self, rpc, self.allowance_s(nbytes), rpc.abort)

    def allowance_s(self, nbytes: int) -> float:
        """How long a transfer may take that holds no memory that others wait for."""
        return self._timeout_s + nbytes / _LEAST_BYTES_PER_S

    def awaits_request(self, rpc: RpcContext) -> AbstractContextManager[None]:
        """Does as `watched` for a block that receives the next request of a call; after `drain` it ends at once.

        It then ends with CancelledError, if there is no request yet.
        """
        return _Pause(self, rpc, self._timeout_s, rpc.abort)

    def upload(
        self, nbytes: int, rpc: RpcContext, memory: Allocator, block: Block, *, is_spare: bool = False
    ) -> AbstractContextManager[None]:
        """Ends a call with a status if the block, which receives ``nbytes`` into memory, is too slow.

        The block then ends with OverloadedError, or TimeoutError if the deadline of the call has passed. While others
        wait, one that is slow and ``is_spare`` is ended though its client has no more than its share.
        """
        stop = rpc.traffic.interrupt
        return _Transfer(self, nbytes, rpc, memory, block, self._window_s, stop, is_spare=is_spare)

    def download(self, nbytes: int, rpc: RpcContext, memory: Allocator, block: Block) -> AbstractContextManager[None]:
        """Aborts a call if the block, which sends ``nbytes`` from memory, is too slow; it then ends as in `upload`."""
        return _Transfer(self, nbytes, rpc, memory, block, self._window_s, rpc.abort)

    def add(self, wait: _Wait) -> None:
        """Begins to watch."""
        with self._mutex:
            self._waits.add(wait)
            if self._draining and isinstance(wait, _Pause):
                wait.end()

    def remove(self, wait: _Wait) -> None:
        """Watches no longer; from then on it is not ended."""
        with self._mutex:
            self._waits.remove(wait)

    def drain(self) -> None:
        """Waits no longer for requests: a call that its client keeps open would delay the server's end."""
        with self._mutex:
            self._draining = True
            for wait in self._waits:
                if isinstance(wait, _Pause):
                    wait.end()

    def close(self) -> None:
        """Ends the thread."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        began = time.monotonic()
        while not self._closing.wait(_CHECK_INTERVAL_S):
            pause_s = time.monotonic() - began - _CHECK_INTERVAL_S
            try:
                if pause_s >= _PAUSE_S:
                    self._excuse(pause_s)
                self._look()
            except Exception:  # the next look makes up for it
                with contextlib.suppress(MemoryError):
                    logger.exception("a look for slow transfers failed")
            began = time.monotonic()

    def _excuse(self, pause_s: float) -> None:
        with self._mutex:
            for wait in self._waits:
                wait.excuse(pause_s)

    def _look(self) -> None:
        now = time.monotonic()
        with self._mutex:
            waits = list(self._waits)
        transfers = [wait for wait in waits if isinstance(wait, _Transfer)]
        for transfer in transfers:
            transfer.measure(now)
        for wait in waits:
            self._check(wait, now)
        for memory in self._memories:
            if memory.is_waited_for:
                self._make_room(memory, [transfer for transfer in transfers if transfer.memory is memory])

    def _check(self, wait: _Wait, now: float) -> None:
        """Ends what is overdue."""
        deadline = wait.rpc.deadline
        if deadline is not None and deadline + _GRACE_S <= now:
            self._end(wait, TimeoutError("the deadline has passed while the client was waited for"))
        elif wait.due_at <= now:
            reason = f"the client is too slow: it has to move {_LEAST_BYTES_PER_S} bytes a second on average"
            self._end(wait, OverloadedError(reason))

    def _make_room(self, memory: Allocator, transfers: Sequence[_Transfer]) -> None:
        """Ends slow transfers of clients with more than their shares, for those that wait and have less."""
        waiting, held_now, shares, free = memory.usage()
        held = Counter(held_now)  # an ended transfer of a client that has nothing else may still be in the list
        missing = sum(nbytes for client, nbytes in waiting if held[client] < shares[client])
        if not missing:
            return
        ending = sum(transfer.block.nbytes for transfer in transfers if transfer.error is not None)
        missing -= free + ending
        slow = [
            transfer
            for transfer in transfers
            if transfer.error is None and transfer.rest_s > _SOON_S and transfer.block.client in shares
        ]

        def excess(transfer: _Transfer) -> float:
            client = transfer.block.client
            return math.inf if transfer.is_spare else held[client] - shares[client]

        # If enough is free, and still does not fit, it is in pieces.
        while slow and (missing > 0 or not ending):
            worst = max(slow, key=lambda transfer: (excess(transfer), transfer.rest_s))
            client, nbytes = worst.block.client, worst.block.nbytes
            if excess(worst) <= 0:
                return
            self._end(worst, OverloadedError("others wait for the memory of this slow transfer"))
            slow.remove(worst)
            held[client] -= nbytes
            missing -= nbytes
            ending += nbytes

    def _end(self, wait: _Wait, error: Exception) -> None:
        with self._mutex:
            if wait in self._waits and wait.error is None:
                logger.info("ending a call of %s: %s", wait.rpc.client, error)
                wait.error = error
                if self._limits_clients and isinstance(wait, _Transfer) and isinstance(error, OverloadedError):
                    wait.memory.limit(wait.rpc.client)
                wait.stop()
