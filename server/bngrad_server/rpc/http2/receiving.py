"""The calls whose messages have not arrived whole: each has a thread that receives, or waits for one.

The threads are shared evenly among clients. A client that was refused for its limits gets none until it has room.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

from bngrad_server.errors import OverloadedError
from bngrad_server.rpc.http2.connection import Caller, WaitingCall
from bngrad_server.rpc.http2.limits.places import ThreadShares
from bngrad_server.rpc_context import RpcContext
from bngrad_wire import http2

_THREADS = 192
"""Of all clients; a client by itself gets 128."""
_TIMEOUT_S = 60.0


class ReceivingCalls:
    """The callers with such a call; for the event loop's thread."""

    def __init__(
        self,
        threads: int = _THREADS,
        timeout_s: float = _TIMEOUT_S,
        *,
        is_worthwhile: Callable[[str], bool] = lambda client: True,
        max_wait_s: float = _TIMEOUT_S,
    ) -> None:
        """Has no calls yet.

        Args:
            threads: The number of threads.
            timeout_s: How long a call may wait for one.
            is_worthwhile: Whether a client may have a request like the one that was last refused for its limits.
            max_wait_s: How long a call may wait for that.
        """
        self._threads = threads
        self._timeout_s = timeout_s
        self._is_worthwhile = is_worthwhile
        self._max_wait_s = max_wait_s
        self._all: dict[Caller, None] = {}  # the oldest comes first
        self._shares: ThreadShares[Caller] = ThreadShares(threads, is_worthwhile)

    def __len__(self) -> int:
        return len(self._all)

    def awaiting_messages(self) -> Iterator[Caller]:
        """Those whose clients have to send more, the oldest first."""
        return (caller for caller in self._all if caller.awaits_message)

    def add(self, caller: Caller, call: http2.ServerCall, rpc: RpcContext) -> bool:
        """Adds a call; returns whether it has a thread now, else it waits for one."""
        self._all[caller] = None
        if self._shares.take(caller, caller.client):
            return True
        timeout_s = self._timeout_s if self._is_worthwhile(caller.client) else self._max_wait_s
        until = min(time.monotonic() + timeout_s, math.inf if rpc.deadline is None else rpc.deadline)
        caller.waiting_call = WaitingCall(call, rpc, until)
        return False

    def discard(self, caller: Caller) -> bool:
        """Ends the call of a caller, or its wait for a thread; returns whether `served` may have some to serve."""
        if caller not in self._all:
            return False
        del self._all[caller]
        caller.waiting_call = None
        self._shares.leave(caller, caller.client)
        return self._shares.is_waited_for

    @property
    def is_waited_for(self) -> bool:
        """Whether a call waits for a thread."""
        return self._shares.is_waited_for

    def served(self) -> Iterator[tuple[Caller, WaitingCall]]:
        """Gives threads to calls that wait, as far as there are threads."""
        while (caller := self._shares.serve_next()) is not None:
            waiting, caller.waiting_call = caller.waiting_call, None
            assert waiting is not None
            yield caller, waiting

    def expired(self) -> Iterator[tuple[Caller, WaitingCall, Exception]]:
        """The calls that have waited for too long, and their errors."""
        now = time.monotonic()
        for caller in list(self._shares.waiting):
            waiting = caller.waiting_call  # None if its connection failed when another call of it was refused
            if waiting is not None and waiting.until <= now:
                deadline = waiting.rpc.deadline
                if deadline is not None and deadline <= now:
                    error: Exception = TimeoutError("the deadline has passed while the call waited for a thread")
                else:
                    threads = f"{self._threads} threads that receive messages"
                    reason = f"this client has its share of the {threads}, or of requests and bytes"
                    error = OverloadedError(reason)
                yield caller, waiting, error
