"""Receives the requests of calls, as far as they may be good ones."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import grpc

from bngrad_server.codec import exchange
from bngrad_server.codec.request_reader import RequestReader
from bngrad_server.engine import Engine
from bngrad_server.errors import MessageTooLargeError, code_of
from bngrad_server.memory.received_message import ReceivedMessage
from bngrad_server.rpc_context import RpcContext
from bngrad_wire import messages
from bngrad_wire.chunks import MessageSource

_REFUSED = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNIMPLEMENTED}
"""How a call ends whose message is malformed, too large, out of order or compressed, so that its op is not known."""
_UNCOUNTED_NBYTES = 64 * 1024
"""Messages up to this size are not counted: a connection has a buffer for as much anyway."""
_BEGINNING_NBYTES = 16 * 1024
"""How much of a larger message is checked before the rest is received."""


class RequestReceiver:
    """Receives messages into memory that the engine bounds, and within the time that it allows."""

    def __init__(
        self, engine: Engine, readers: Mapping[str, RequestReader], chunked_readers: Mapping[int, RequestReader]
    ) -> None:
        """Checks messages with the readers of unary ops, by name, and of exchanges, by the number of their field."""
        self._engine = engine
        self._readers = readers
        self._chunked_readers = chunked_readers

    def receive(self, source: MessageSource, nbytes: int, rpc: RpcContext, op_name: str = "") -> ReceivedMessage:
        """Receives a message whose size is known, and counts it if it is large.

        Args:
            source: Gives the message.
            nbytes: Its size.
            rpc: Its call.
            op_name: The op of a unary call; empty for a request of an exchange.

        Raises:
            DecodeError: Its beginning shows that it is malformed; the rest was not received.
            Exception: See `bngrad_server.engine.Engine.receive`.
        """
        if nbytes > _UNCOUNTED_NBYTES:
            return self._engine.receive(source, nbytes, rpc, partial(self._read_checked, op_name))
        with self._engine.transfers.watched(nbytes, rpc):
            return ReceivedMessage(source.read(nbytes))

    def _read_checked(self, op_name: str, source: MessageSource, memory: memoryview) -> None:
        """Reads a large message into memory of its size, as far as it may be a good one."""
        beginning, nbytes = memory[:_BEGINNING_NBYTES], len(memory)
        source.read_into(beginning)
        if op_name:
            self._readers[op_name].check_beginning(beginning, nbytes)
        else:
            part = messages.only_field(beginning, nbytes)
            if part is not None and (reader := self._chunked_readers.get(part[0])) is not None:
                reader.check_beginning(beginning[part[1] :], nbytes - part[1])
        source.read_into(memory[_BEGINNING_NBYTES:])

    def next_request(self, source: MessageSource, rpc: RpcContext) -> tuple[int, ReceivedMessage] | None:
        """Receives the next request of an exchange, see `exchange.request_of`; None at the end of the exchange.

        Raises:
            CancelledError: The server stops.
            Exception: See `receive`.
        """
        try:
            with self._engine.transfers.awaits_request(rpc):
                nbytes = source.receive_message()
            if nbytes is None:
                return None
            if nbytes > self._engine.max_message_nbytes:
                limit = f"at most {self._engine.max_message_nbytes} bytes beside its chunks"
                raise MessageTooLargeError(f"a request must have {limit}, not {nbytes}")
            message = self.receive(source, nbytes, rpc)
            try:
                rpc.check()
                number, message.data = exchange.request_of(message.data)
            except BaseException:
                message.release()
                raise
            return number, message
        except Exception as error:
            self.count_refused(error)
            raise

    def count_refused(self, error: Exception) -> None:
        """Counts a call that ends before its op is known, for what its client sent."""
        if (code := code_of(error)) in _REFUSED:
            self._engine.observer.metrics.refused_call(code.name)
