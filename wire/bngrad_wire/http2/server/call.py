"""A call as its server sees it."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from bngrad_wire.fields import Buffer
from bngrad_wire.http2 import frames, header_block
from bngrad_wire.http2.call import BaseCall, split_messages
from bngrad_wire.http2.carrier import Carrier
from bngrad_wire.http2.errors import ErrorCode, RpcError, Status
from bngrad_wire.http2.sending import PREFIX
from bngrad_wire.http2.server.request_headers import CallHeaders

WHOLE_NBYTES = 2**18
"""Of several calls on a connection, those whose messages are smaller are received whole before they begin."""
_MESSAGE_NBYTES = 2048
"""What a message of a response earns the client, as if it had sent this much more."""
_RESPONSE_BLOCK = header_block.encode([(":status", "200"), ("content-type", header_block.CONTENT_TYPE)])
_ENCODINGS_BLOCK = header_block.encode([("grpc-accept-encoding", "identity")])
"""What a client has to know whose compressed message is refused."""
_OK_BLOCK = header_block.encode(header_block.status_headers(0, "", b""))
_ENDED_HERE = RpcError(Status.CANCELLED, "the call was ended here")
"""The failure of every ended call, which raises copies of it: an error takes long to make."""


class ServerCall(BaseCall):
    """A call as its server sees it, until `end`.

    Attributes:
        path: "/package.Service/Method".
        timeout_s: The client's deadline, in seconds from the start of the call; None is no limit.
        metadata: All headers except pseudo-headers; binary ones are still in base64.
    """

    lends_memory = False
    _lent_from_nbytes = 4 * 2**20  # more than a client's, since the server waits until all was read

    def __init__(self, connection: Carrier, stream_id: int, headers: CallHeaders) -> None:
        super().__init__(connection, stream_id)
        self.path, self.timeout_s, self.metadata, _ = headers
        self._headers_sent = False

    def move_to(self, carrier: Carrier) -> None:
        """Goes on with another carrier, before anything was read or sent."""
        self._connection = carrier
        carrier.stream = self

    @property
    def is_arriving(self) -> bool:
        """Whether the rest of the call may arrive soon, as it is small."""
        if self.ended or self.failure is not None:
            return False
        nbytes = len(self.receive_buffer)
        if nbytes >= PREFIX.size:
            nbytes = max(nbytes, PREFIX.size + PREFIX.unpack_from(self.receive_buffer)[1])
        return nbytes < WHOLE_NBYTES or self._connection.expects_whole

    def received_messages(self) -> list[Buffer] | None:
        """Returns the messages of a call that has arrived whole and that nothing was read of, without reading them.

        None if it has not arrived whole, or a message is compressed or cut off.
        """
        return split_messages(self.receive_buffer) if self.is_fully_received else None

    @property
    def answer_room(self) -> int:
        """How many bytes the messages of `answer` may have, with their prefixes, if it is not to wait."""
        return min(self.send_window, self._connection.answer_room)

    def answer(self, messages: Sequence[bytes], trailers: bytes = b"") -> None:
        """Sends the whole response, of some messages, and ends the call with status OK; see `end`.

        What was not read of the call counts as read.
        """
        connection = self._connection
        size = sum(map(len, messages)) + len(messages) * PREFIX.size
        is_plain = not (self._headers_sent or connection.table_size_update or self.failure is not None)
        if is_plain and self.ended and self._fits_one_frame(size):
            parts = [part for message in messages for part in (PREFIX.pack(0, len(message)), message)]
            connection.earn(_MESSAGE_NBYTES)
            connection.outbound.append(frames.frame(frames.HEADERS, frames.END_HEADERS, self.id, _RESPONSE_BLOCK))
            self._append_frame(parts, size, 0)
            end = frames.END_HEADERS | frames.END_STREAM
            connection.outbound.append(frames.frame(frames.HEADERS, end, self.id, _OK_BLOCK + trailers))
            self.failure = _ENDED_HERE
            connection.close_stream(self)
            connection.flush()
            return
        for message in messages:
            self.send_message(message, more=True)
        self.end(trailers=trailers)

    def send_message(self, *buffers: Buffer, more: bool = False, end: bool = False) -> None:
        """See `BaseCall.send_message`; waits until the client has read what was lent, so has answered a PING.

        A client that stalls never gets the trailers, so it has no result either.
        """
        connection = self._connection
        try:
            super().send_message(*buffers, more=more, end=end)
            if connection.io.has_lent:
                connection.ping()
                self._handle_frames_while(lambda: connection.unanswered_ping)
        finally:
            connection.io.has_lent = False  # also after a failure: the next call may not wait

    def _begin_message(self) -> None:
        self._connection.earn(_MESSAGE_NBYTES)
        if not self._headers_sent:
            self._headers_sent = True
            self._connection.append_headers(self.id, _RESPONSE_BLOCK, 0)

    def end(self, code: int = 0, message: str = "", details: bytes = b"", *, trailers: bytes = b"") -> None:
        """Ends the call with a status; does nothing if it has ended or the client has reset it.

        Args:
            code: gRPC's status code; 0 is OK.
            message: What went wrong; any text.
            details: A serialised ``google.rpc.Status``.
            trailers: More trailers, as `bngrad_wire.http2.header_block.encode` encodes them.

        Raises:
            PeerGoneError: The connection is gone.
            TimeoutError: The socket's timeout passed.
        """
        block = _OK_BLOCK
        if code or message or details:
            block = _status_block(code, message, details)
        block += trailers
        connection = self._connection
        if connection.stream is not self:
            return
        if self.failure is None and not self.ended:
            connection.handle_available_frames()
        if self.failure is None:
            if not self._headers_sent:
                block = _RESPONSE_BLOCK + (_ENCODINGS_BLOCK if code == Status.UNIMPLEMENTED else b"") + block
            connection.append_headers(self.id, block, frames.END_STREAM)
            if not self.ended:
                connection.outbound.append(frames.rst_stream(self.id, ErrorCode.NO_ERROR))
        self.failure = self.failure or _ENDED_HERE
        connection.close_stream(self)
        connection.flush()


@functools.lru_cache(maxsize=256)
def _status_block(code: int, message: str, details: bytes) -> bytes:
    return header_block.encode(header_block.status_headers(code, message, details))
