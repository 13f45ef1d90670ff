"""Calls without a thread: submitted by the event loop, and answered by it once a worker has computed them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from functools import partial

from bngrad_server.memory.received_message import ReceivedMessage
from bngrad_server.rpc.http2.connection import Caller, InlineCall
from bngrad_server.rpc.servicer import UNARY_OPS, Servicer
from bngrad_server.rpc_context import RpcContext
from bngrad_server.staged_request import StagedRequest
from bngrad_wire import http2
from bngrad_wire.fields import Buffer


class InlineCalls:
    """The callers with such a call; for the event loop's thread."""

    def __init__(self, servicer: Servicer, on_end: Callable[[Caller, InlineCall], None]) -> None:
        """Has no calls yet.

        Args:
            servicer: Computes the requests.
            on_end: Called by any thread when a call's request has ended, also after the call was given up.
        """
        self._servicer = servicer
        self._on_end = on_end
        self._callers: set[Caller] = set()

    def begin(self, caller: Caller, call: http2.ServerCall, message: ReceivedMessage, rpc: RpcContext) -> bool:
        """Submits a call whose message has arrived; returns False, and begins nothing, if no memory is free.

        Raises:
            Exception: See `bngrad_server.rpc.servicer.Servicer.submit`.
        """
        submit = partial(self._servicer.submit, UNARY_OPS[call.path], message.data)
        return self._begin(caller, call, rpc, submit)

    def begin_exchange(
        self, caller: Caller, call: http2.ServerCall, received: Sequence[Buffer], rpc: RpcContext
    ) -> bool:
        """Does as `begin` for an exchange whose messages have all arrived; also returns False if it may be a bad one.

        Raises:
            Exception: See `bngrad_server.rpc.servicer.Servicer.submit_exchange`.
        """
        return self._begin(caller, call, rpc, partial(self._servicer.submit_exchange, received))

    def _begin(
        self,
        caller: Caller,
        call: http2.ServerCall,
        rpc: RpcContext,
        submit: Callable[[RpcContext, Callable[[], None]], StagedRequest | None],
    ) -> bool:
        inline = InlineCall(call, rpc)
        staged = submit(rpc, partial(self._on_end, caller, inline))
        if staged is None:
            return False
        inline.staged = staged
        caller.inline_call = inline
        self._callers.add(caller)
        return True

    def forget(self, caller: Caller) -> None:
        """Forgets the call of a caller, since it has ended or is given up."""
        caller.inline_call = None
        self._callers.remove(caller)

    def abandon(self, caller: Caller, inline: InlineCall) -> None:
        """Gives a call up, whose client is gone; a request that is being computed runs to its end."""
        self.forget(caller)
        inline.is_abandoned = True
        assert inline.staged.job is not None
        if self._servicer.batcher.leave(inline.staged.job, CancelledError()):
            inline.staged.close()

    def expired(self) -> Iterator[tuple[Caller, InlineCall, Exception]]:
        """Gives up the calls whose deadline has passed while a worker computes them; yields them with their errors."""
        for caller in list(self._callers):
            inline = caller.inline_call
            if inline is None:  # its connection failed when another call of it was refused
                continue
            assert inline.staged.job is not None
            try:
                self._servicer.batcher.expire(inline.staged.job)
            except (TimeoutError, CancelledError) as error:
                self.forget(caller)
                inline.is_abandoned = True
                inline.staged.close(error)
                yield caller, inline, error
