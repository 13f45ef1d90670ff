"""Calls that watch the server's health, on connections with several calls: none has a thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from bngrad_server.errors import OverloadedError
from bngrad_server.rpc.health import Health
from bngrad_server.rpc.http2.connection import Lane
from bngrad_server.rpc_context import RpcContext
from bngrad_server.runtime.event_loop import EventLoop
from bngrad_wire import http2

_MAX_WATCHES = 512


@dataclass(eq=False)
class _Watch:
    call: http2.ServerCall
    rpc: RpcContext
    service: str
    reported: bytes = b""


class HealthWatches:
    """The lanes with such a call; for the event loop's thread."""

    def __init__(self, health: Health, event_loop: EventLoop, on_end: Callable[[Lane, Exception | None], None]) -> None:
        """Has no calls yet; ``on_end`` is told that one has ended, or has to for an error."""
        self._health = health
        self._on_end = on_end
        self._all: dict[Lane, _Watch] = {}
        health.on_change.append(partial(event_loop.call_soon, self.report))

    def begin(self, lane: Lane, call: http2.ServerCall, rpc: RpcContext) -> None:
        """Reports the health of a service to a call, now and whenever it changes.

        Raises:
            OverloadedError: There are too many such calls.
            DecodeError: The request is malformed, or there is none.
            TimeoutError: It has not arrived in time.
            RpcError: It is compressed.
        """
        if len(self._all) >= _MAX_WATCHES:
            raise OverloadedError(f"the server's health is watched by {_MAX_WATCHES} calls")
        messages = call.received_messages()
        if call.is_arriving:
            raise TimeoutError("the request did not arrive in time")
        if not messages:
            raise DecodeError("the call has no request")
        request = health_pb2.HealthCheckRequest.FromString(bytes(messages[0]))
        self._all[lane] = _Watch(call, rpc, request.service)
        self._report(lane)

    def forget(self, lane: Lane) -> None:
        """Forgets the call of a lane, if it has one."""
        self._all.pop(lane, None)

    def report(self) -> None:
        """Reports what has changed."""
        for lane in list(self._all):
            self._report(lane)

    def tick(self) -> None:
        """Reports what clients had no room for; ends calls whose connection, token or deadline is over."""
        now = time.monotonic()
        for lane, watch in list(self._all.items()):
            if lane.connection.is_outdated:
                self._end(lane, None)
                continue
            try:
                watch.rpc.check()
                if watch.rpc.deadline is not None and now > watch.rpc.deadline:
                    raise TimeoutError("the deadline has passed")
            except Exception as error:
                self._end(lane, error)
            else:
                self._report(lane)

    def _report(self, lane: Lane) -> None:
        if (watch := self._all.get(lane)) is None:  # its connection failed as it was told something else
            return
        is_closed = self._health.is_closed  # first: what is reported after it is the last
        response = self._health.watched(watch.service).SerializeToString()
        if response != watch.reported and watch.call.has_window_for([len(response)]):
            watch.reported = response
            try:
                watch.call.send_message(response)
            except Exception as error:
                self._end(lane, error)
                return
        if is_closed:
            self._end(lane, None)

    def _end(self, lane: Lane, error: Exception | None) -> None:
        self.forget(lane)
        self._on_end(lane, error)
