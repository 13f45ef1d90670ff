"""The calls of ``bngrad.v1.BatchNormGradService`` without their transport, as the .proto file documents them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import grpc

from bngrad_kernels.spec import FieldViolation, InvalidArgumentError
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_server.codec.ops import OPS
from bngrad_server.codec.requests import RequestReader
from bngrad_server.engine import Engine
from bngrad_server.errors import code_of
from bngrad_server.rpc_context import RpcContext
from bngrad_server.security.auth import ALLOW_ALL, Authenticator
from bngrad_server.staged_request import StagedRequest
from bngrad_server.workers.pool import WorkerState
from bngrad_wire import __version__, messages
from bngrad_wire.messages import Buffer

SERVICE = pb.DESCRIPTOR.services_by_name["BatchNormGradService"]
UNARY_OPS = tuple(op.name for op in OPS)
_OP_NUMBERS = frozenset(op.exchange_number for op in OPS)
_NO_REQUEST = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED}
"""How an exchange ends that goes on with no request: with garbage, a stray chunk or a compressed message."""
_CHUNK = pb.ExchangeRequest.CHUNK_FIELD_NUMBER
"""The number of a chunk in both messages of an exchange."""

_WORKER_STATES = {
    WorkerState.STARTING: pb.WORKER_STATE_STARTING,
    WorkerState.READY: pb.WORKER_STATE_READY,
}


class ExchangeSource(Protocol):
    """A client's side of an exchange, over whatever transport.

    Attributes:
        chunk_nbytes: How large the chunks of the answer should be.
    """

    chunk_nbytes: int

    def receive(self) -> bytes | None:
        """The next message whole; None where there is no further one."""

    def receive_into(self, target: memoryview) -> None:
        """Fills the target from the next chunks.

        Raises:
            InvalidArgumentError: They do not fit, or are none.
        """


class Servicer:
    """Answers from an engine.

    Attributes:
        batcher: The engine's.
        guard: Says who may call; asked by whoever takes calls.
        observer: Told by whoever takes calls of those that do not get as far as the engine.
    """

    def __init__(self, engine: Engine, max_message_bytes: int, guard: Authenticator = ALLOW_ALL) -> None:
        self.batcher = engine.batcher
        self.guard = guard
        self.observer = engine.observer
        self._engine = engine
        self._max_message_bytes = max_message_bytes
        self._readers = {op.name: RequestReader(op, chunked=False) for op in OPS}
        self._chunked_readers = {op.exchange_number: RequestReader(op, chunked=True) for op in OPS}
        self.endpoints = pb.Endpoints()

    @contextmanager
    def answer(self, op_name: str, data: bytes, caller: RpcContext) -> Iterator[list[Buffer]]:
        """Computes an op, and lends the pieces of its response until the block ends.

        Raises:
            Exception: See `bngrad_server.codec.requests.RequestReader.read` and `bngrad_server.engine`.
        """
        with self._staged(self._readers[op_name], data, caller) as staged:
            staged.copy_from(data)
            staged.compute()
            with self._engine.transfer(_nbytes(staged.large_outputs), caller):
                yield staged.response()

    def submit(self, op_name: str, data: bytes, caller: RpcContext, on_end: Callable[[], None]) -> StagedRequest | None:
        """Begins what `answer` does, without waiting; gives None, and has begun nothing, where that cannot be.

        The caller looks at the outcome with `StagedRequest.check` when ``on_end`` was called, and closes what it got.

        Raises:
            Exception: See `answer`.
        """
        staged = self._stage(self._readers[op_name], data, caller, may_wait=False)
        if staged is not None:
            try:
                staged.copy_from(data)
                staged.submit(on_end)
            except BaseException as error:
                staged.close(error)
                raise
        return staged

    @contextmanager
    def lent(self, staged: StagedRequest, caller: RpcContext) -> Iterator[list[Buffer]]:
        """Lends the pieces of a response until the block ends, and then closes it; the caller may not take for ever."""
        with staged, self._engine.transfer(_nbytes(staged.large_outputs), caller):
            yield staged.response()

    def exchange(self, source: ExchangeSource, caller: RpcContext) -> Iterator[list[Buffer]]:
        """Answers the requests of an exchange until it ends.

        Yields:
            Each message to send, in pieces, which must be used before the next one is asked for.

        Raises:
            Exception: See `answer`; the exchange is then over.
        """
        while (begun := self._next_request(source, caller)) is not None:
            number, data = begun
            with self._staged(self._chunked_readers[number], data, caller) as staged:
                request = staged.request
                staged.copy_from(data)
                with self._engine.transfer(_nbytes(staged.large_inputs), caller):
                    for i in request.chunk_order:
                        source.receive_into(_there(staged.large_inputs[i]))
                staged.compute()
                pieces = staged.response()
                with self._engine.transfer(_nbytes(staged.large_outputs), caller):
                    yield [messages.field_prefix(number, sum(map(len, pieces))), *pieces]
                    for output in staged.large_outputs:
                        yield from messages.chunks(_CHUNK, _there(output), source.chunk_nbytes)

    def watched(self, caller: RpcContext, nbytes: int = 0) -> AbstractContextManager[None]:
        """Hangs up on a caller that takes too long to send or receive, for what is known of the size."""
        return self._engine.transfers.watched(nbytes, caller)

    def _next_request(self, source: ExchangeSource, caller: RpcContext) -> tuple[int, bytes] | None:
        """The next request of an exchange, see `_request_of`; None where there is no further one."""
        try:
            with self.watched(caller):  # also the wait for it: whoever stands still has a thread, of few
                message = source.receive()
            if message is None:
                return None
            caller.check()
            return _request_of(message)
        except Exception as error:
            if (code := code_of(error)) in _NO_REQUEST:
                self.observer.metrics.refused_call(code.name)
            raise

    def _staged(self, reader: RequestReader, data: bytes, caller: RpcContext) -> StagedRequest:
        staged = self._stage(reader, data, caller)
        assert staged is not None
        return staged

    def _stage(
        self, reader: RequestReader, data: bytes, caller: RpcContext, *, may_wait: bool = True
    ) -> StagedRequest | None:
        """Reads a request and lends memory for it; see `bngrad_server.engine.Engine.stage`."""
        received_at = time.monotonic()
        request = None
        try:
            self._engine.admission.check(caller.client, caller.deadline)  # to read costs more than to refuse
            request = reader.read(data)
            return self._engine.stage(request, caller, received_at, may_wait=may_wait)
        except BaseException as error:
            transport = reader.transport_of(data) if request is None else request.transport
            self.observer.failed(reader.op.name, transport, caller, error, received_at)
            raise

    def server_info(self) -> bytes:
        """The response of ServerInfo."""
        devices = [
            pb.Device(
                name=status.name,
                description=status.description,
                state=_WORKER_STATES[status.state],
                restarts=status.restarts,
                memory_bytes=status.memory_bytes,
            )
            for status in self._engine.pool.status()
        ]
        limits = pb.Limits(max_message_bytes=self._max_message_bytes, arena_bytes=self._engine.arena.nbytes)
        return pb.ServerInfoResponse(
            version=__version__,
            devices=devices,
            limits=limits,
            ops=UNARY_OPS,
            endpoints=self.endpoints,
            requests=self._engine.admission.requests,
            batch_sizes=self._engine.batcher.counts.sizes,
            device_remark=self._engine.device_remark,
        ).SerializeToString()


def chunk_of(message: bytes) -> memoryview:
    """The content of a message that must be a chunk.

    Raises:
        InvalidArgumentError: It is something else.
        DecodeError: It is not even a message.
    """
    field = messages.only_field(message, len(message))
    if field is not None and field[0] == _CHUNK:
        return memoryview(message)[field[1] :]
    parsed = pb.ExchangeRequest.FromString(message)
    if parsed.WhichOneof("part") != "chunk":
        raise exchange_error(f"a chunk must follow, not {parsed.WhichOneof('part') or 'nothing'}")
    return memoryview(parsed.chunk)


def exchange_error(description: str) -> InvalidArgumentError:
    """The error for messages that come in the wrong order or have the wrong size."""
    return InvalidArgumentError((FieldViolation("part", description),))


def _request_of(message: bytes) -> tuple[int, bytes]:
    """Which op a message asks for, by the number of its field, and the op's own message."""
    field = messages.only_field(message, len(message))
    if field is not None and field[0] in _OP_NUMBERS:
        return field[0], message[field[1] :]
    parsed = pb.ExchangeRequest.FromString(message)
    part = parsed.WhichOneof("part")
    if part in (None, "chunk"):
        raise exchange_error(f"a request must come first, not {part or 'nothing'}")
    assert part is not None
    return parsed.DESCRIPTOR.fields_by_name[part].number, getattr(parsed, part).SerializeToString()


def _there(view: memoryview | None) -> memoryview:
    """The memory of a tensor that is not in a region, as none is of an exchange."""
    assert view is not None
    return view


def _nbytes(views: Sequence[memoryview | None]) -> int:
    return sum(len(view) for view in views if view is not None)
