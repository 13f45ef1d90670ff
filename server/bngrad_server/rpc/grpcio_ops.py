"""The ops on the grpcio port: their handlers, the threads they run in, and how their messages are received."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.message import DecodeError

from bngrad_kernels.spec import InvalidArgumentError
from bngrad_server.config import MAX_CALLS, ServerConfig
from bngrad_server.errors import OverloadedError
from bngrad_server.memory.received_message import ReceivedMessage
from bngrad_server.rpc.fair_shares import FairShares
from bngrad_server.rpc.futile_calls import FutileCalls, is_before
from bngrad_server.rpc.grpcio_calls import (
    abort,
    account_of,
    call_at_end,
    check_active,
    counted,
    receive,
    receive_required,
    rpc_context,
)
from bngrad_server.rpc.request_receiver import ExchangeSource
from bngrad_server.rpc.servicer import EXCHANGE_PATH, SERVER_INFO_PATH, UNARY_OPS, Servicer
from bngrad_server.rpc_context import MessageTraffic, RpcContext
from bngrad_server.runtime.executors import HandlerExecutor, InlineExecutor
from bngrad_server.runtime.tcp_throttle import TcpThrottle
from bngrad_server.runtime.traffic_accounts import OpTraffic, Peer
from bngrad_server.security.auth import authenticated_client
from bngrad_server.telemetry.load import LoadMeter
from bngrad_wire.chunks import WholeMessages
from bngrad_wire.limits import MAX_PROTOBUF_NBYTES

Behavior = TypeVar("Behavior", bound=Callable[..., Any])

_CHUNK_NBYTES = 2**20
"""grpcio is fastest with chunks of about this size: smaller ones cost calls, larger ones the cache."""
_OP_THREADS = 512
"""For unary ops, and as many for exchanges."""
FREE_THREADS = 16
"""How many threads of each kind never wait for a client."""
_MAX_WAITING = _OP_THREADS - MAX_CALLS - FREE_THREADS
"""How many of them wait for a place."""
_MAX_QUEUE = 1024
"""The most unary ops that wait for a thread, and the most exchanges."""
_UNSENT_NBYTES = 2**16
"""What an unsent response costs in addition to its bytes, which are there twice."""


class OpHandlers(grpc.GenericRpcHandler):
    """The handlers of the service; messages pass as bytes, since generated code would copy their tensors.

    The ops have threads of their own, so that other calls, health checks among them, are answered however many ops
    wait. A call that waits for a thread or a place takes next to no memory, since its message has not been received.
    """

    def __init__(self, servicer: Servicer, config: ServerConfig, throttle: TcpThrottle) -> None:
        self._metrics = servicer.observer.metrics
        unary, exchange = (HandlerExecutor(_OP_THREADS, name) for name in ("grpcio-unary", "grpcio-exchange"))
        # The message of a unary call says how large the request is: that of a client at its limits is not received.
        is_worthwhile = servicer.admission.is_worthwhile
        places = f"{MAX_CALLS} places for unary calls, or of requests and bytes"
        unary_places = FairShares(places, MAX_CALLS, _MAX_WAITING, is_worthwhile)
        servicer.admission.on_leave.append(unary_places.serve)
        exchange_places = FairShares(f"{MAX_CALLS} places for exchanges", MAX_CALLS, _MAX_WAITING)
        unsent = FairShares("memory for unsent answers", config.arena_bytes // 2)
        self._futile = futile = FutileCalls()
        self._executors = {**dict.fromkeys(UNARY_OPS, unary), EXCHANGE_PATH: exchange}
        self._handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            # On the wire, such a call is a unary one; but its message is received when the handler asks for it.
            path: grpc.stream_unary_rpc_method_handler(
                _run_in(unary, _unary(servicer, name, unary_places, unsent, config.max_wait_s, throttle, futile))
            )
            for path, name in UNARY_OPS.items()
        }
        self._handlers[EXCHANGE_PATH] = grpc.stream_stream_rpc_method_handler(
            _run_in(exchange, _exchange(servicer, exchange_places, throttle, futile))
        )
        self._handlers[SERVER_INFO_PATH] = grpc.unary_unary_rpc_method_handler(lambda *_: servicer.info.response())
        inline = InlineExecutor()
        self._busy: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(
            _run_in(inline, _refuse("too many calls wait for a thread", lambda context: None))
        )
        self._cancels_too_much: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(
            _run_in(inline, _refuse("this client has cancelled too many calls", partial(_pause, throttle)))
        )

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        """See `grpc.GenericRpcHandler`."""
        executor = self._executors.get(handler_call_details.method)
        if executor is None:
            return self._handlers.get(handler_call_details.method)
        cancels_too_much = self._has_futile_calls()
        if cancels_too_much or executor.queue_size >= _MAX_QUEUE:
            self._metrics.refused_call(grpc.StatusCode.RESOURCE_EXHAUSTED.name)
            return self._cancels_too_much if cancels_too_much else self._busy
        return self._handlers[handler_call_details.method]

    def _has_futile_calls(self) -> bool:
        client = authenticated_client.get(None)
        return client is not None and self._futile.are_too_many(client)


def _run_in(executor: ThreadPoolExecutor, behavior: Behavior) -> Behavior:
    behavior.experimental_thread_pool = executor  # type: ignore[attr-defined]
    return behavior


def _refuse(
    reason: str, before: Callable[[grpc.ServicerContext], None]
) -> Callable[[Iterator[bytes], grpc.ServicerContext], NoReturn]:
    def refuse(requests: Iterator[bytes], context: grpc.ServicerContext) -> NoReturn:
        before(context)
        abort(context, OverloadedError(reason))

    return refuse


def _pause(throttle: TcpThrottle, context: grpc.ServicerContext) -> None:
    throttle.refused(context.peer(), authenticated_client.get())


def _unary(
    servicer: Servicer,
    op_name: str,
    places: FairShares,
    unsent: FairShares,
    max_wait_s: float,
    throttle: TcpThrottle,
    futile: FutileCalls,
) -> Callable[[Iterator[bytes], grpc.ServicerContext], bytes]:
    def handle(requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        def room(nbytes: int) -> AbstractContextManager[None]:
            return unsent.part(rpc.client, 2 * nbytes + _UNSENT_NBYTES, context, max_wait_s)

        name = context.peer()
        rpc, peer = rpc_context(context, name, servicer.authenticator), throttle.peer(name)
        op = peer.op(account_of(rpc, servicer.authenticator))
        try:
            check_active(context)
            with ExitStack() as until_sent:
                with op, places.part(rpc.client, 1, context, max_wait_s):
                    op.begin_to_receive()
                    next_message = partial(receive_required, requests, op)
                    call = servicer.unary_copy(
                        op_name, _receive_request(servicer, op_name, rpc, next_message), rpc, room
                    )
                    response = until_sent.enter_context(call)
                check_active(context)
                op.answered()
                futile.answered(rpc.client)
                _report_load(servicer.load, peer, context)
                sent = until_sent.pop_all().close
            call_at_end(context, sent)  # when the client has read the response, or the call was cancelled
            return response
        except Exception as error:
            _count_failure(op, futile, error, rpc)
            abort(context, error)

    return handle


def _receive_request(
    servicer: Servicer, op_name: str, rpc: RpcContext, receive: Callable[[], bytes | None]
) -> ReceivedMessage:
    """Receives the message of a unary call."""
    began = time.monotonic()
    try:
        with servicer.transfers.watched(0, rpc):
            message = receive()
            if message is None:
                raise DecodeError("the call has no request")
        return ReceivedMessage(message)
    except Exception as error:
        servicer.observer.failed(op_name, "unary", rpc, error, began)
        raise


def _exchange(
    servicer: Servicer, places: FairShares, throttle: TcpThrottle, futile: FutileCalls
) -> Callable[[Iterator[bytes], grpc.ServicerContext], Iterator[bytes]]:
    def handle(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        traffic = MessageTraffic(context.cancel)
        name = context.peer()
        rpc, peer = rpc_context(context, name, servicer.authenticator), throttle.peer(name)
        rpc = replace(rpc, traffic=traffic)
        op = peer.op(account_of(rpc, servicer.authenticator))
        source = ExchangeSource(
            WholeMessages(partial(receive, requests, op)),
            WholeMessages(counted(partial(receive_required, requests, op), traffic)),
            _CHUNK_NBYTES,
            MAX_PROTOBUF_NBYTES,
        )
        try:
            check_active(context)
            with op, places.part(rpc.client, 1, context):
                op.begin_to_receive()
                for pieces in servicer.exchange(source, rpc):
                    check_active(context)
                    message = b"".join(pieces)
                    yield message
                    op.answered()
                    futile.answered(rpc.client)
                    traffic.moved += len(message)
            _report_load(servicer.load, peer, context)
        except Exception as error:
            _count_failure(op, futile, error, rpc)
            abort(context, error)

    return handle


def _report_load(load: LoadMeter, peer: Peer, context: grpc.ServicerContext) -> None:
    """Reports the load with an answer, unless the client knows it: grpcio takes 20 µs for a report."""
    report = load.trailers()
    if peer.load_listener.needs(report):
        context.set_trailing_metadata(report.metadata)


def _count_failure(op: OpTraffic, futile: FutileCalls, error: Exception, rpc: RpcContext) -> None:
    """Tells whether the client or the server is the cause of a failure."""
    if isinstance(error, OverloadedError):
        op.was_refused()
    elif isinstance(error, CancelledError):
        if is_before(rpc.deadline):
            op.was_futile()
            futile.cancelled(rpc.client)
    elif isinstance(error, (DecodeError, InvalidArgumentError)):
        op.was_futile()
