"""The requests and chunks of an exchange on `bngrad_wire.http2`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_server.rpc.servicer import chunk_of, exchange_error
from bngrad_server.staged_request import copy
from bngrad_wire import http2, messages

MAX_MESSAGE_NBYTES = 64 * 2**20
"""The largest message that is received whole."""
_CHUNK_NBYTES = 4 * 2**20 - 64
"""The largest chunk that fits a stock client's default limit for messages."""
_OWN_CHUNK_NBYTES = 2**28
"""For our own client, which does not hold a message in memory."""


class Upload:
    """See `bngrad_server.rpc.servicer.ExchangeSource`."""

    def __init__(self, call: http2.ServerCall, watched: Callable[[int], AbstractContextManager[None]]) -> None:
        """Reads from a call.

        Args:
            call: The call.
            watched: Bounds the time that the reading of so many bytes takes.
        """
        self._call = call
        self._watched = watched
        is_own = call.metadata.get("user-agent") == "bngrad"
        self.chunk_nbytes = _OWN_CHUNK_NBYTES if is_own else _CHUNK_NBYTES

    def receive(self) -> bytes | None:
        """See `bngrad_server.rpc.servicer.ExchangeSource`."""
        nbytes = self._call.receive_message()
        if nbytes is None:
            return None
        if nbytes > MAX_MESSAGE_NBYTES:
            limit = f"at most {MAX_MESSAGE_NBYTES} bytes beside its chunks"
            raise exchange_error(f"a request must have {limit}, not {nbytes}")
        with self._watched(nbytes):
            return self._call.read(nbytes)

    def receive_into(self, target: memoryview) -> None:
        """See `bngrad_server.rpc.servicer.ExchangeSource`."""
        start = 0
        while start < len(target):
            nbytes = self._call.receive_message()
            if nbytes is None:
                raise exchange_error(f"{len(target) - start} bytes of chunks are missing")
            start += self._receive_chunk(target[start:], nbytes)

    def _receive_chunk(self, target: memoryview, nbytes: int) -> int:
        """Reads a message straight into the target, and gives the size of its chunk."""
        call = self._call
        head = call.read(min(nbytes, messages.PREFIX_NBYTES))
        field = messages.only_field(head, nbytes)
        if field is None or field[0] != pb.ExchangeRequest.CHUNK_FIELD_NUMBER:
            if nbytes > MAX_MESSAGE_NBYTES:
                raise exchange_error("a chunk must be the only field of its message")
            chunk = chunk_of(head + call.read(nbytes - len(head)))
            _check_fits(len(chunk), target)
            copy(target[: len(chunk)], chunk)
            return len(chunk)
        size = nbytes - field[1]
        _check_fits(size, target)
        first = head[field[1] :]
        target[: len(first)] = first
        call.read_into(target[len(first) : size])
        return size


def _check_fits(nbytes: int, target: memoryview) -> None:
    if nbytes > len(target):
        raise exchange_error(f"a chunk has {nbytes - len(target)} bytes more than its tensor")
