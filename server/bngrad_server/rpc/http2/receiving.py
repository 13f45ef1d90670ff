"""The calls whose messages have not arrived whole: each has a thread that receives, or waits for one.

The threads are shared evenly among clients. A client that was refused for its limits gets none until it has room.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

from bngrad_server.errors import OverloadedError
from bngrad_server.rpc.http2.connection import Connection, WaitingCall
from bngrad_server.rpc.http2.limits.places import ThreadShares
from bngrad_server.rpc_context import RpcContext
from bngrad_wire import http2

_THREADS = 192
"""Of all clients; a client by itself gets 128."""
_TIMEOUT_S = 60.0


class ReceivingCalls:
    """The connections with such a call; for the event loop's thread."""

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
        self._all: dict[Connection, None] = {}  # the oldest comes first
        self._shares: ThreadShares[Connection] = ThreadShares(threads, is_worthwhile)

    def __len__(self) -> int:
        return len(self._all)

    def awaiting_messages(self) -> Iterator[Connection]:
        """Those whose clients have to send more, the oldest first."""
        return (connection for connection in self._all if connection.awaits_message)

    def add(self, connection: Connection, call: http2.ServerCall, rpc: RpcContext) -> bool:
        """Adds a call; returns whether it has a thread now, else it waits for one."""
        self._all[connection] = None
        if self._shares.take(connection, connection.client):
            return True
        timeout_s = self._timeout_s if self._is_worthwhile(connection.client) else self._max_wait_s
        until = min(time.monotonic() + timeout_s, math.inf if rpc.deadline is None else rpc.deadline)
        connection.waiting_call = WaitingCall(call, rpc, until)
        return False

    def discard(self, connection: Connection) -> bool:
        """Ends the call of a connection, or its wait for a thread; returns whether `served` may have some to serve."""
        if connection not in self._all:
            return False
        del self._all[connection]
        connection.waiting_call = None
        self._shares.leave(connection, connection.client)
        return self._shares.is_waited_for

    @property
    def is_waited_for(self) -> bool:
        """Whether a call waits for a thread."""
        return self._shares.is_waited_for

    def served(self) -> Iterator[tuple[Connection, WaitingCall]]:
        """Gives threads to calls that wait, as far as there are threads."""
        while (connection := self._shares.serve_next()) is not None:
            waiting, connection.waiting_call = connection.waiting_call, None
            assert waiting is not None
            yield connection, waiting

    def expired(self) -> Iterator[tuple[Connection, WaitingCall, Exception]]:
        """The calls that have waited for too long, and their errors."""
        now = time.monotonic()
        for connection in list(self._shares.waiting):
            waiting = connection.waiting_call
            assert waiting is not None
            if waiting.until <= now:
                deadline = waiting.rpc.deadline
                if deadline is not None and deadline <= now:
                    error: Exception = TimeoutError("the deadline has passed while the call waited for a thread")
                else:
                    threads = f"{self._threads} threads that receive messages"
                    reason = f"this client has its share of the {threads}, or of requests and bytes"
                    error = OverloadedError(reason)
                yield connection, waiting, error
