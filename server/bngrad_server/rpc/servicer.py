"""The calls of ``bngrad.v1.BatchNormGradService``, as the .proto file documents them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_server.codec import exchange
from bngrad_server.codec.ops import OPS
from bngrad_server.codec.request import InvalidRequestError
from bngrad_server.codec.request_reader import RequestReader, ahead_header
from bngrad_server.codec.short_chunks import ShortChunks
from bngrad_server.engine import Engine
from bngrad_server.errors import MessageTooLargeError
from bngrad_server.memory.ahead import ConnectionTickets
from bngrad_server.memory.received_message import ReceivedMessage
from bngrad_server.rpc.request_receiver import RequestReceiver
from bngrad_server.rpc.server_info import ServerInfo
from bngrad_server.rpc_context import RpcContext
from bngrad_server.security.auth import ALLOW_ALL, Authenticator
from bngrad_server.staged_request import StagedRequest
from bngrad_wire import chunks, messages
from bngrad_wire.chunks import AHEAD_CHUNK, REQUEST_CHUNK, ChunkField, MessageSource
from bngrad_wire.fields import MAX_NBYTES, Buffer

SERVICE = pb.DESCRIPTOR.services_by_name["BatchNormGradService"]
_PREFIX = f"/{SERVICE.full_name}/"
UNARY_OPS = {_PREFIX + op.name: op.name for op in OPS}
"""The paths of the unary calls, and the names of their ops."""
EXCHANGE_PATH = f"{_PREFIX}Exchange"
SEND_AHEAD_PATH = f"{_PREFIX}SendAhead"
SERVER_INFO_PATH = f"{_PREFIX}ServerInfo"


class Servicer:
    """Answers calls with the engine.

    Attributes:
        admission: The engine's admission.
        batcher: The engine's batcher.
        small_requests: Those that the engine computes in the calling thread.
        shared_requests: Those that the engine computes in the thread of an event loop.
        transfers: The engine's watchdog, which ends calls whose client sends or receives too slowly.
        load: The engine's load, which the ports report with each answer.
        observer: Counts and logs requests; the ports report the calls that fail before they reach the engine.
        authenticator: Tells which client a call belongs to; the ports ask it.
        max_wait_s: How long a call may wait for the server.
        forget_connection: Forgets the tensors that were sent ahead over a connection.
        info: What ServerInfo answers.
        receive: Receives the message of a unary call, see `RequestReceiver.receive`.
    """

    def __init__(self, engine: Engine, authenticator: Authenticator = ALLOW_ALL) -> None:
        self.admission = engine.admission
        self.batcher = engine.batcher
        self.small_requests = engine.small_requests
        self.shared_requests = engine.shared_requests
        self.transfers = engine.transfers
        self.load = engine.load
        self.observer = engine.observer
        self.authenticator = authenticator
        self.info = ServerInfo(engine)
        self.max_wait_s = engine.max_wait_s
        self.forget_connection = engine.sent_ahead.end
        self._engine = engine
        self._short_chunks = ShortChunks()
        self._readers = {op.name: RequestReader(op, chunked=False) for op in OPS}
        self._chunked_readers = {op.exchange_number: RequestReader(op, chunked=True) for op in OPS}
        self._receiver = RequestReceiver(engine, self._readers, self._chunked_readers)
        self.receive = self._receiver.receive

    @property
    def max_message_nbytes(self) -> int:
        """The largest message that the server receives whole."""
        return self._engine.max_message_nbytes

    def answer_at_once(
        self,
        path: str,
        received: Sequence[Buffer],
        rpc: RpcContext,
        room: float = math.inf,
        *,
        in_event_loop: bool = False,
    ) -> list[bytes] | None:
        """Answers a call in the calling thread, without a worker, if it can.

        Args:
            path: The path of the call.
            received: Its messages.
            rpc: Its context.
            room: How many bytes its client takes at once; a longer response would have to wait.
            in_event_loop: Whether the calling thread is that of an event loop.

        Returns:
            The messages of the response; None, and nothing is done, for a call that must go another way.

        Raises:
            Exception: See `bngrad_server.engine.Engine.compute_at_once`.
        """
        received_at = time.monotonic()
        if path == EXCHANGE_PATH:
            reader, message = self._exchanged(received[0])
        else:
            reader, message = self._readers.get(UNARY_OPS.get(path, "")), received[0]
        request = None if reader is None else reader.known(message)
        if request is None or not self._engine.computes_at_once(request, room, in_event_loop=in_event_loop):
            return None
        elements: list[Buffer] = []
        if request.chunked:
            whole = exchange.whole_chunks(received[1:], request.sizes.tensor)
            if len(whole) != len(request.chunk_order):
                return None
            elements = [whole[request.chunk_order.index(i)] for i in range(len(whole))]
        elif len(received) > 1:
            return None
        return self._engine.compute_at_once(request, elements, message, rpc, received_at)

    @contextmanager
    def unary(self, op_name: str, message: ReceivedMessage, rpc: RpcContext) -> Iterator[list[Buffer]]:
        """Computes an op, releases its message early, and lends the response, in pieces, until the block ends.

        Raises:
            Exception: See `bngrad_server.codec.request_reader.RequestReader.read` and `bngrad_server.engine`.
        """
        with self._compute(op_name, message, rpc) as staged, self._engine.download(staged):
            yield staged.response()

    def _compute(self, op_name: str, message: ReceivedMessage, rpc: RpcContext) -> StagedRequest:
        """Computes an op, and releases its message early; the caller closes the staged request."""
        try:
            staged = self._stage(self._readers[op_name], message.data, rpc)
            try:
                staged.copy_from(message.data)
                message.release()
                self._engine.compute(staged)
            except BaseException as error:
                staged.close(error)
                raise
            return staged
        finally:
            message.release()

    def submit(self, op_name: str, data: Buffer, rpc: RpcContext, on_end: Callable[[], None]) -> StagedRequest | None:
        """Begins to compute an op without waiting; returns None, and begins nothing, if no memory is free.

        After ``on_end`` was called, the port asks `StagedRequest.check` for the outcome, and closes the staged request.
        It raises what `unary` raises.
        """
        staged = self._try_to_stage(self._readers[op_name], data, rpc, may_wait=False)
        return None if staged is None else self._submit(staged, data, (), on_end)

    def submit_exchange(
        self, received: Sequence[Buffer], rpc: RpcContext, on_end: Callable[[], None]
    ) -> StagedRequest | None:
        """Does as `submit` for an exchange that has arrived whole, if it is one request whose like has come before."""
        reader, request_bytes = self._exchanged(received[0])
        data = bytes(request_bytes)
        if reader is None or (request := reader.known(data)) is None:
            return None
        elements = exchange.whole_chunks(received[1:], request.sizes.tensor)
        sent = sum(not isinstance(source, bytes) for source in request.large_inputs)  # and not ahead
        if not len(received) - 1 == len(elements) == sent:
            return None
        staged = self._try_to_stage(reader, data, rpc, may_wait=False)
        return None if staged is None else self._submit(staged, data, elements, on_end)

    def _exchanged(self, message: Buffer) -> tuple[RequestReader | None, Buffer]:
        """Returns what reads the request in a message of an exchange, and the request; None if it is no plain one."""
        part = messages.only_field(message, len(message))
        return (None, b"") if part is None else (self._chunked_readers.get(part[0]), message[part[1] :])

    def _submit(
        self, staged: StagedRequest, data: Buffer, elements: Sequence[memoryview], on_end: Callable[[], None]
    ) -> StagedRequest:
        try:
            staged.copy_from(data, elements)
            self._engine.submit(staged, on_end)
        except BaseException as error:
            staged.close(error)
            raise
        return staged

    @contextmanager
    def response(self, staged: StagedRequest, chunk_nbytes: int) -> Iterator[Iterator[list[Buffer]]]:
        """Lends the `messages_of` a submitted request until the block ends, and then closes the request.

        A client that takes too long to receive them is cut off.
        """
        with staged, self._engine.download(staged):
            yield self.messages_of(staged, chunk_nbytes)

    def messages_of(self, staged: StagedRequest, chunk_nbytes: int) -> Iterator[list[Buffer]]:
        """Yields the messages of a response, in pieces: use them before the memory of the request is released."""
        pieces = staged.response()
        if not staged.request.chunked:
            yield pieces
            return
        yield staged.request.exchange_pieces(pieces)
        for output in staged.large_outputs:
            yield from chunks.split(exchange.CHUNK, _in_arena(output), chunk_nbytes)

    def exchange(self, source: MessageSource, chunk_nbytes: int, rpc: RpcContext) -> Iterator[list[Buffer]]:
        """Answers the requests of an exchange until it ends.

        Yields:
            Each message to send, in pieces, which are valid until the next one is asked for.

        Raises:
            Exception: See `unary`; the exchange is then over.
        """
        while (received := self._receiver.next_request(source, rpc)) is not None:
            number, message = received
            try:
                staged = self._stage(self._chunked_readers[number], message.data, rpc)
            except BaseException:
                message.release()
                raise
            with staged:
                try:
                    staged.copy_from(message.data)
                finally:
                    message.release()
                with self._engine.upload(staged):
                    for i in staged.request.chunk_order:
                        target = staged.large_inputs[i]
                        if target is not None:  # it was not sent ahead
                            self._receive_chunks(source, REQUEST_CHUNK, target)
                self._engine.compute(staged)
                with self._engine.download(staged):
                    yield from self.messages_of(staged, chunk_nbytes)

    def send_ahead(self, source: MessageSource, tickets: ConnectionTickets, rpc: RpcContext) -> bytes:
        """Takes a tensor ahead of the request that needs it, and forgets others; returns the serialised response.

        Raises:
            InvalidArgumentError: The message describes no tensor.
            DecodeError: It is malformed.
            Exception: See `bngrad_server.sent_ahead.SentAhead`.
        """
        try:
            with self.transfers.watched(0, rpc):
                nbytes = source.receive_message() or 0
                if nbytes > MAX_NBYTES:
                    raise MessageTooLargeError(f"the first message must have at most {MAX_NBYTES} bytes, not {nbytes}")
                message = pb.SendAheadRequest.FromString(source.read(nbytes))
            self._engine.sent_ahead.forget(message.forget, rpc.client)
            ticket = b""
            if message.HasField("tensor"):
                header = ahead_header(message.tensor)
                if message.tensor.HasField("location"):
                    ticket = self._engine.sent_ahead.copy(header, message.tensor.location, tickets, rpc)
                else:
                    read_into = partial(self._receive_chunks, source, AHEAD_CHUNK)
                    ticket = self._engine.sent_ahead.receive(header, tickets, rpc, read_into)
            return pb.SendAheadResponse(ticket=ticket).SerializeToString()
        except Exception as error:
            self._receiver.count_refused(error)
            raise

    def _receive_chunks(self, source: MessageSource, chunk: ChunkField, tensor: memoryview) -> None:
        """Fills a tensor of the arena."""
        source = self._engine.arena.source_for(tensor, source)
        exchange.receive_chunks(source, chunk, tensor, self._short_chunks.counter())

    def _stage(self, reader: RequestReader, data: Buffer, rpc: RpcContext) -> StagedRequest:
        staged = self._try_to_stage(reader, data, rpc, may_wait=True)
        assert staged is not None
        return staged

    def _try_to_stage(
        self, reader: RequestReader, data: Buffer, rpc: RpcContext, *, may_wait: bool
    ) -> StagedRequest | None:
        """Reads a request and takes memory for it; see `bngrad_server.engine.Engine.stage`."""
        received_at = time.monotonic()
        request = None
        try:
            self._engine.admission.check(rpc.client, rpc.deadline)  # to read the request costs more than to refuse it
            request = reader.read(data)
            return self._engine.stage(request, rpc, received_at, may_wait=may_wait)
        except BaseException as error:
            if isinstance(error, InvalidRequestError):
                transport = error.transport
            else:
                transport = reader.transport_of(data) if request is None else request.transport
            self.observer.failed(reader.op.name, transport, rpc, error, received_at)
            raise


def _in_arena(view: memoryview | None) -> memoryview:
    """Returns the view: every output of an exchange lies in the arena, none in a shared region."""
    assert view is not None
    return view
