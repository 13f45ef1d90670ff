"""Small calls: those whose message has arrived whole need no thread of their own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError

from bngrad_server.rpc.http2_handlers import UNARY
from bngrad_server.rpc.servicer import Servicer
from bngrad_server.rpc_context import RpcContext
from bngrad_server.scheduling.batcher import Batcher
from bngrad_server.staged_request import StagedRequest
from bngrad_wire import http2

_MAX_RESPONSE_NBYTES = 64 * 1024


class InlineCall:
    """A call that waits for a worker or is computed; nothing here waits.

    Attributes:
        call: The call.
        caller: Who made it.
        staged: Its place in memory, once it has been submitted.
        is_over: Whether nobody waits for it any longer.
    """

    staged: StagedRequest

    def __init__(self, call: http2.ServerCall, caller: RpcContext) -> None:
        self.call = call
        self.caller = caller
        self.is_over = False

    def submit(self, calls: Servicer, data: bytes, on_end: Callable[[], None]) -> bool:
        """Has a worker compute it, and says whether that goes without waiting; see `Servicer.submit`."""
        staged = calls.submit(UNARY[self.call.path], data, self.caller, on_end)
        if staged is not None:
            self.staged = staged
        return staged is not None

    def send(self) -> bool:
        """Answers the call, and says whether the client takes the answer without waiting; else nothing is sent.

        Raises:
            Exception: Why it could not be computed.
        """
        self.staged.check()
        pieces = self.staged.response()
        nbytes = sum(map(len, pieces))
        if nbytes > _MAX_RESPONSE_NBYTES or not self.call.has_window_for(nbytes):
            return False
        self.call.send_message(*pieces, more=True)
        self.call.end()
        return True

    def check_patience(self, batcher: Batcher) -> None:
        """Gives it up if it is too late for it, or nobody wants it; one that still waits ends by `on_end`.

        Raises:
            TimeoutError: It is given up: its deadline has passed.
            CancelledError: Alike, since the client has reset it.
        """
        assert self.staged.job is not None
        try:
            batcher.check_patience(self.staged.job)
        except (TimeoutError, CancelledError) as error:
            self.is_over = True
            self.staged.close(error)
            raise

    def abandon(self, batcher: Batcher) -> None:
        """Gives it up, since nobody waits for it any longer."""
        assert self.staged.job is not None
        self.is_over = True
        if batcher.leave(self.staged.job, CancelledError()):
            self.staged.close()
