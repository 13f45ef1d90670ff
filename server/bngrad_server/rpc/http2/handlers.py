"""Handles the calls of the HTTP/2 port, in threads that may wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import grpc
from google.protobuf.message import DecodeError

from bngrad_server.errors import MessageTooLargeError, UnauthenticatedError, cut, grpc_status
from bngrad_server.memory.ahead import ConnectionTickets
from bngrad_server.memory.received_message import ReceivedMessage
from bngrad_server.rpc.other_calls import REFLECTION_PATHS, WATCH_PATH, OtherCalls
from bngrad_server.rpc.servicer import EXCHANGE_PATH, SEND_AHEAD_PATH, UNARY_OPS, Servicer
from bngrad_server.rpc_context import RpcContext, no_check
from bngrad_server.staged_request import StagedRequest
from bngrad_server.telemetry.load import LoadListener
from bngrad_wire import http2
from bngrad_wire.fields import Buffer
from bngrad_wire.http2.errors import Status
from bngrad_wire.http2.sockets.patience import Patience

_PATHS = frozenset({*UNARY_OPS, EXCHANGE_PATH, SEND_AHEAD_PATH})
_UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED
_CHUNK_NBYTES = 4 * 2**20 - 64
"""The largest chunk that a stock client takes, whose messages have at most 4 MiB by default."""
_SDK_CHUNK_NBYTES = 2**28
"""For our own client, which receives chunks without holding them in memory."""
_AT_ONCE_NBYTES = 2**20
"""A larger response of an inline call is sent by a thread: the event loop would keep other calls waiting."""
_OTHER_NBYTES = 64 * 1024
"""The largest message of a call that is no op."""
_OTHER_WAITS = 2
"""How often such a call waits for another message, each time for the timeout that `Http2Calls` gives the socket."""


class Http2Handler:
    """Handles the calls of one connection.

    Attributes:
        saw_malformed: Whether a message was malformed; reset once that was counted.

    All methods raise ConnectionError or TimeoutError if the connection is no longer usable.
    """

    def __init__(
        self, servicer: Servicer, others: OtherCalls, end: Callable[[], object], io: Patience, client: str
    ) -> None:
        """Handles calls that belong to a client, see `RpcContext.client`; ``end`` ends one from any thread."""
        self._servicer = servicer
        self._others = others
        self._io = io
        self._abort = end
        self._traffic = _ByteTraffic(io)
        self._client = client
        self._load_listener = LoadListener()
        self._tickets: ConnectionTickets = set()
        self.saw_malformed = False

    def for_lane(self, end: Callable[[], object], io: Patience) -> Http2Handler:
        """Returns what handles another call of the connection at the same time."""
        handler = Http2Handler(self._servicer, self._others, end, io, self._client)
        handler._load_listener, handler._tickets = self._load_listener, self._tickets
        return handler

    def adopted(self, call: http2.ServerCall, rpc: RpcContext) -> RpcContext:
        """Returns the context of a call that another handler has checked."""
        return replace(rpc, is_cancelled=partial(_has_failed, call), abort=self._abort, traffic=self._traffic)

    def close(self) -> None:
        """Forgets the tensors that were sent ahead over the connection, whose calls have ended."""
        if self._tickets:
            self._servicer.forget_connection(self._tickets)

    def checked_context(self, call: http2.ServerCall) -> RpcContext:
        """Authenticates a call, and checks its path; to be called before anything else is done for it.

        Raises:
            UnauthenticatedError: The call has no valid token.
            RpcError: Its method is not served here.
        """
        deadline = deadline_of(call)
        authenticator = self._servicer.authenticator
        check: Callable[[], object] = no_check
        client = self._client
        if not authenticator.is_open(call.path):
            check = partial(authenticator.authenticate, call.metadata.get("authorization"), client)
            client = authenticator.authenticate(call.metadata.get("authorization"), client)
        is_watch = call.path == WATCH_PATH and not is_sdk(call)
        if call.path not in _PATHS and call.path not in self._others and not is_watch:
            self._servicer.observer.metrics.refused_call(_UNIMPLEMENTED.name)
            raise http2.RpcError(_UNIMPLEMENTED.value[0], f"{cut(call.path)} is not served here")
        # A token may tell clients apart that are one user to the system: none must see another's tensors.
        call.lends_memory = not authenticator.requires_token
        is_cancelled = partial(_has_failed, call)
        return RpcContext(client, deadline, is_cancelled, self._abort, call.metadata, check, self._traffic)

    def receive_request(self, call: http2.ServerCall, rpc: RpcContext) -> ReceivedMessage:
        """Receives the message of a unary call; empty if there is none.

        Raises:
            MessageTooLargeError: The message must go by `Exchange`.
            OverloadedError: There is no room for it, or the client sends it too slowly.
            RpcError: It is compressed.
        """
        began = time.monotonic()
        try:
            if call.is_fully_received:
                return ReceivedMessage(call.read(self._checked(call.receive_message())))
            with self._servicer.transfers.watched(0, rpc):
                nbytes = self._checked(call.receive_message())
            return self._servicer.receive(call, nbytes, rpc, UNARY_OPS[call.path])
        except Exception as error:
            self._servicer.observer.failed(UNARY_OPS[call.path], "unary", rpc, error, began)
            raise

    def answer_at_once(self, call: http2.ServerCall, received: Sequence[Buffer], rpc: RpcContext) -> bool:
        """Answers a call whose messages have all arrived, in the event loop, if the servicer can; returns whether.

        Raises:
            Exception: See `bngrad_server.rpc.servicer.Servicer.answer_at_once`.
        """
        if call.path in self._others:
            return self._answer_other_at_once(call, received[0])
        room = self._answer_room(call)
        responses = self._servicer.answer_at_once(call.path, received, rpc, room, in_event_loop=True)
        if responses is None:
            return False
        call.answer(responses, self._load_trailers())
        return True

    def flush(self, http: http2.ServerConnection) -> None:
        """Sends what the socket did not take at once; cuts off a client that does not receive it in time."""
        with self._servicer.transfers.watched(0, self._no_call()):
            http.flush()

    def handle(self, call: http2.ServerCall, rpc: RpcContext) -> None:
        """Receives and answers a call that has been checked."""
        rpc = replace(rpc, is_cancelled=_is_cancelled(call))
        try:
            if call.path in UNARY_OPS:
                self.handle_unary(call, self.receive_request(call, rpc), rpc)
            elif call.path in self._others:
                self._answer_other(call, rpc)
            elif call.path == SEND_AHEAD_PATH:
                call.send_message(self._servicer.send_ahead(call, self._tickets, rpc), more=True)
                self.end(call)
            else:
                for pieces in self._servicer.exchange(call, _chunk_nbytes(call), rpc):
                    call.send_message(*pieces)
                self.end(call)
        except Exception as error:
            self.refuse(call, error)

    def handle_unary(self, call: http2.ServerCall, message: ReceivedMessage, rpc: RpcContext) -> None:
        """Answers a unary call whose message has been received."""
        rpc = replace(rpc, is_cancelled=_is_cancelled(call))
        try:
            with self._servicer.unary(UNARY_OPS[call.path], message, rpc) as pieces:
                call.send_message(*pieces, more=True)
                self.end(call)
        except Exception as error:
            self.refuse(call, error)

    def answer(self, call: http2.ServerCall, staged: StagedRequest) -> bool:
        """Answers a call that was computed inline, in the event loop, if the response need not wait for its client.

        Returns whether it did; then the memory of the staged request is no longer used.
        """
        responses = list(self._servicer.messages_of(staged, _chunk_nbytes(call)))
        sizes = [sum(map(len, pieces)) for pieces in responses]
        if sum(sizes) > _AT_ONCE_NBYTES or call.sent_nbytes(sizes) > self._answer_room(call):
            return False
        call.answer(list(map(b"".join, responses)), self._load_trailers())
        return True

    def send_response(self, call: http2.ServerCall, staged: StagedRequest) -> None:
        """Sends the response of a call that was computed inline, and closes its staged request."""
        try:
            with self._servicer.response(staged, _chunk_nbytes(call)) as responses:
                for pieces in responses:
                    call.send_message(*pieces, more=True)
                self.end(call)
        except Exception as error:
            self.refuse(call, error)

    def refuse(self, call: http2.ServerCall, error: Exception) -> None:
        """Does as `refuse`, and notes whether the message was malformed."""
        self.saw_malformed = isinstance(error, DecodeError)
        refuse(call, error)

    def _answer_room(self, call: http2.ServerCall) -> float:
        """How many bytes an answer may have; where clients have limits, unread ones count, so none is kept."""
        return call.send_room if self._servicer.admission.limits_clients else call.answer_room

    def _answer_other_at_once(self, call: http2.ServerCall, message: Buffer) -> bool:
        if call.path in REFLECTION_PATHS or len(message) > _OTHER_NBYTES:
            return False
        response = self._others[call.path](bytes(message))
        if not call.has_window_for([len(response)]):
            return False
        call.answer([response])
        return True

    def _answer_other(self, call: http2.ServerCall, rpc: RpcContext) -> None:
        """Answers the message of a call that is no op, or each message of a reflection until the client pauses."""
        answer, is_unary = self._others[call.path], call.path not in REFLECTION_PATHS
        waits = self._io.waits
        with self._servicer.transfers.watched(0, rpc):
            nbytes = call.receive_message()
            if nbytes is None and is_unary:
                raise http2.RpcError(grpc.StatusCode.INVALID_ARGUMENT.value[0], "the call has no request")
            while nbytes is not None:
                if nbytes > _OTHER_NBYTES:
                    raise MessageTooLargeError(f"the request must have at most {_OTHER_NBYTES} bytes, not {nbytes}")
                message = call.read(nbytes)
                rpc.check()
                call.send_message(answer(message), more=True)
                self._io.waits = _OTHER_WAITS
                try:
                    nbytes = call.receive_message()
                except TimeoutError:
                    break
                finally:
                    self._io.waits = waits
                if is_unary:  # as grpcio does: whatever follows has no answer
                    break
            call.end()

    def end(self, call: http2.ServerCall) -> None:
        """Ends an answered call; its trailers have the server's load if this connection does not know it yet."""
        call.end(trailers=self._load_trailers())

    def _load_trailers(self) -> bytes:
        report = self._servicer.load.trailers()
        return report.block if self._load_listener.needs(report) else b""

    def _no_call(self) -> RpcContext:
        """Returns a context by which a connection without a call can be aborted."""
        return RpcContext(self._client, None, lambda: False, self._abort, {})

    def _checked(self, nbytes: int | None) -> int:
        limit = self._servicer.max_message_nbytes
        if nbytes is not None and nbytes > limit:
            limits = f"at most {limit} bytes, not {nbytes}; larger ones go by Exchange"
            raise MessageTooLargeError(f"the request must have {limits}")
        return nbytes or 0


class _ByteTraffic:
    """The progress of a connection; see `bngrad_server.rpc_context.Traffic`."""

    def __init__(self, io: Patience) -> None:
        self._io = io
        self.interrupt = io.interrupt
        self.resume = io.resume

    @property
    def moved(self) -> int:
        return self._io.moved


def _chunk_nbytes(call: http2.ServerCall) -> int:
    return _SDK_CHUNK_NBYTES if is_sdk(call) else _CHUNK_NBYTES


def is_op(call: http2.ServerCall) -> bool:
    """Whether a call computes an op, or sends a tensor for one."""
    return call.path in _PATHS


def is_sdk(call: http2.ServerCall) -> bool:
    """Whether a call comes from our own client, which makes one at a time on a connection."""
    return call.metadata.get("user-agent") == "bngrad"


def deadline_of(call: http2.ServerCall) -> float | None:
    """The deadline of a call that begins now, by the monotonic clock."""
    return None if call.timeout_s is None else time.monotonic() + call.timeout_s


def refuse(call: http2.ServerCall, error: Exception) -> None:
    """Ends a call with the status of an error.

    Raises:
        ConnectionError: The error is one, or the connection fails meanwhile.
    """
    if isinstance(error, ConnectionError):
        raise error
    if isinstance(error, UnauthenticatedError):
        call.end(Status.UNAUTHENTICATED, str(error))  # nothing else: no details for a stranger
    elif isinstance(error, http2.RpcError):  # the client has reset the call, and may make others
        call.end(error.code, error.message)
    else:
        code, status = grpc_status(error)
        call.end(code.value[0], status.message, status.SerializeToString())


def _has_failed(call: http2.ServerCall) -> bool:
    return call.failure is not None


def _is_cancelled(call: http2.ServerCall) -> Callable[[], bool]:
    """Returns what tells any thread whether a call of this thread was cancelled; only this one reads the connection."""
    owner = threading.get_ident()
    return lambda: call.cancelled() if threading.get_ident() == owner else call.failure is not None
