"""The calls of connections with several that have begun to arrive, and may soon have arrived whole."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from bngrad_server.rpc.http2.connection import Connection, Lane
from bngrad_server.rpc.other_calls import CHECK_PATH, WATCH_PATH
from bngrad_server.rpc.servicer import EXCHANGE_PATH, SERVER_INFO_PATH, UNARY_OPS
from bngrad_wire import http2

_UNARY_PATHS = frozenset({*UNARY_OPS, SERVER_INFO_PATH, CHECK_PATH})
_UNARY_REST_S = 0.1
"""How long the rest of a unary call is awaited at least. One that arrives whole needs no thread."""
_EXCHANGE_REST_S = 0.01
"""The same for an exchange, whose client may wait for an answer before it ends the call."""
_LARGE_REST_S = 1.0
"""How much longer it is awaited once memory for all of it was taken: beside other calls it takes its time."""
_WATCH_TIMEOUT_S = 60.0
"""How long the request of a call is awaited that never has a thread."""


class ArrivingCalls:
    """The lanes with such a call; for the event loop's thread."""

    def __init__(self) -> None:
        self._all: dict[Connection, dict[Lane, float]] = {}

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self._all))

    def add(self, lane: Lane, call: http2.ServerCall) -> None:
        """Adds a call that has begun."""
        until = time.monotonic() + _patience_s(call)
        self._all.setdefault(lane.connection, {})[lane] = until

    def forget(self, lane: Lane) -> None:
        """Forgets a call that has ended."""
        lanes = self._all.get(lane.connection, {})
        lanes.pop(lane, None)
        if not lanes:
            self._all.pop(lane.connection, None)

    def ready(self, connection: Connection, heard: Iterable[int] | None = None) -> Iterator[Lane]:
        """Removes and yields those of a connection's calls that have arrived, or have not in time.

        Args:
            connection: The connection.
            heard: The streams of calls of which something has arrived; None for all.
        """
        lanes = self._all.get(connection, {})
        for lane in list(lanes) if heard is None else [connection.lanes.get(each) for each in heard]:
            if lane is None or (until := lanes.get(lane)) is None:
                continue
            call, more_s = lane.lane.stream, _LARGE_REST_S * lane.lane.expects_whole
            if isinstance(call, http2.ServerCall) and call.is_arriving and time.monotonic() < until + more_s:
                continue
            self.forget(lane)
            yield lane


def _patience_s(call: http2.ServerCall) -> float:
    path = call.path
    if path == WATCH_PATH:
        return _WATCH_TIMEOUT_S if call.timeout_s is None else min(_WATCH_TIMEOUT_S, call.timeout_s)
    if path in _UNARY_PATHS:
        return _UNARY_REST_S
    # Clients of other calls may send a message, and wait for the answer before they send more.
    return _EXCHANGE_REST_S if path == EXCHANGE_PATH else 0.0
