"""The loop that fills a buffer from chunk messages, over messages that arrive whole or in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise

import pytest
from tests.hostile_messages import HOSTILE, SIZES, at_little_cost, sized
from tests.unit.wire.http2.peers import client

from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_wire import chunks, messages
from bngrad_wire.chunks import ChunkError, MessageSource, WholeMessages, copy
from bngrad_wire.http2 import ServerCall

NUMBER = pb.ExchangeRequest.CHUNK_FIELD_NUMBER
DATA = bytes(range(256)) * 1024
UNKNOWN_FIELD = b"\xf8\x07\x01"
LONG_FIELD = sized(100, bytes(60_000))
REQUEST = pb.ExchangeRequest(fused_batch_norm_grad_v3={}).SerializeToString()

Send = Callable[[list[bytes]], MessageSource]


@pytest.fixture(params=["whole", "http2"])
def send(request: pytest.FixtureRequest) -> Iterator[Send]:
    """Returns the source of messages that were sent."""
    if request.param == "whole":
        yield lambda messages: WholeMessages(iter([*messages, None]).__next__)
        return
    with client(answer=_echo_at_the_end) as connection:

        def send(messages: list[bytes]) -> MessageSource:
            call = connection.call("/echo")
            for message in messages:
                call.send_message(message, more=True)
            call.half_close()
            return call

        yield send


def _echo_at_the_end(call: ServerCall) -> None:
    messages = []
    while (nbytes := call.receive_message()) is not None:
        messages.append(call.read(nbytes))
    for message in messages:
        call.send_message(message, more=True)
    call.end()


def chunk(data: bytes) -> bytes:
    return pb.ExchangeRequest(chunk=data).SerializeToString()


@pytest.mark.parametrize("chunk_nbytes", [1000, 64 * 1024, 100_000, len(DATA), 2 * len(DATA)])
def test_chunks_fill_the_target_whatever_their_size(send: Send, chunk_nbytes: int) -> None:
    source = send([b"".join(pieces) for pieces in chunks.split(NUMBER, memoryview(DATA), chunk_nbytes)])
    target = bytearray(len(DATA))
    chunks.receive(source, chunks.REQUEST_CHUNK, memoryview(target))
    assert target == DATA
    assert source.receive_message() is None


def test_each_target_has_chunks_of_its_own(send: Send) -> None:
    source = send([chunk(b""), chunk(b"a"), chunk(b""), chunk(b"bc"), chunk(b"defghijk"), b"rest"])
    first, second = bytearray(3), bytearray(8)
    for target in first, bytearray(), second:
        chunks.receive(source, chunks.REQUEST_CHUNK, memoryview(target))
    assert first + second == b"abcdefghijk"
    assert source.receive_message() == 4


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "5 bytes of chunks are missing"),
        ([chunk(b"1234")], "1 bytes of chunks are missing"),
        ([chunk(b"123456")], "a chunk has 1 bytes more than its tensor"),
        ([chunk(b"123"), chunk(bytes(100_000))], "a chunk has 99998 bytes more than its tensor"),
        ([b""], "a chunk must follow, not nothing"),
        ([UNKNOWN_FIELD * 10], "a chunk must follow, not nothing"),
        ([REQUEST], "a chunk must follow, not fused_batch_norm_grad_v3"),
        ([REQUEST + chunk(b"12345")], "a chunk must follow, not fused_batch_norm_grad_v3"),
        ([chunk(b"12345") + REQUEST], "the only part of its message, not beside fused_batch_norm_grad_v3"),
        ([UNKNOWN_FIELD + chunk(b"1") + chunk(b"2345")], "a chunk must be the only part of its message"),
        ([chunk(b"123456") + UNKNOWN_FIELD], "a chunk has 1 bytes more than its tensor"),
        ([chunk(b"123") + UNKNOWN_FIELD, chunk(DATA) + UNKNOWN_FIELD], f"a chunk has {len(DATA) - 2} bytes more"),
        ([UNKNOWN_FIELD * 17 + chunk(b"12345")], "a message must have at most 16 fields"),
        ([chunk(b"12345") + UNKNOWN_FIELD * 17], "a message must have at most 16 fields"),
        ([b"\xff"], "the varint at byte 0 has no end"),
        ([chunk(b"12345") + b"\xff"], "the varint at byte 0 has no end"),
        ([b"\x22\xff"], "the varint at byte 1 has no end"),
        ([UNKNOWN_FIELD + b"\x22\x05abcd"], "field 4 ends at byte 10, after the message"),
    ],
)
def test_other_messages_are_errors(send: Send, messages: list[bytes], problem: str) -> None:
    source = send(messages)
    with pytest.raises(ChunkError, match=problem):
        chunks.receive(source, chunks.REQUEST_CHUNK, memoryview(bytearray(5)))


def test_a_chunk_of_a_tensor_sent_ahead_is_empty_if_its_message_is(send: Send) -> None:
    tensor = pb.SendAheadRequest(tensor={}).SerializeToString()
    source = send([b"", chunk(b"123"), UNKNOWN_FIELD * 10, chunk(b"45"), tensor, chunk(b"1") + tensor])
    target = bytearray(5)
    chunks.receive(source, chunks.AHEAD_CHUNK, memoryview(target))
    assert target == b"12345"
    for problem in "a chunk must follow, not tensor", "the only part of its message, not beside tensor":
        with pytest.raises(ChunkError, match=problem):
            chunks.receive(source, chunks.AHEAD_CHUNK, memoryview(target))


@pytest.mark.parametrize("beside", [UNKNOWN_FIELD, UNKNOWN_FIELD * 10, LONG_FIELD], ids=["one", "many", "long"])
@pytest.mark.parametrize("small", [b"", DATA[:3], DATA[:1000]], ids=len)
def test_chunks_may_come_beside_other_fields(send: Send, beside: bytes, small: bytes) -> None:
    large = DATA[len(small) :]
    source = send([chunk(small) + beside, beside + chunk(large[:-1]) + UNKNOWN_FIELD, chunk(large[-1:]), b"rest"])
    target = bytearray(len(DATA))
    chunks.receive(source, chunks.REQUEST_CHUNK, memoryview(target))
    assert target == DATA
    assert source.receive_message() == 4


@pytest.mark.parametrize("chunk_first", [True, False])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("content", HOSTILE)
def test_what_comes_beside_a_chunk_is_bounded(content: str, size: int, chunk_first: bool) -> None:
    beside = HOSTILE[content](size)
    message = chunk(b"12345") + beside if chunk_first else beside + chunk(b"12345")
    source = WholeMessages(iter([message, None]).__next__)
    with at_little_cost(), suppress(ChunkError):
        chunks.receive(source, chunks.REQUEST_CHUNK, memoryview(bytearray(5)))
        assert size < SIZES[-1]


@pytest.mark.parametrize("nbytes", [0, 1, 32 * 1024, 32 * 1024 + 1, 10**6])
def test_copy_copies_all_bytes(nbytes: int) -> None:
    source = (DATA * 4)[:nbytes]
    target = bytearray(nbytes)
    copy(memoryview(target), source)
    assert target == source


@pytest.mark.parametrize(("nbytes", "chunk_nbytes"), [(0, 4), (1, 4), (4, 4), (5, 4), (1000, 300), (300, 1000)])
def test_chunks_are_messages_of_one_field_that_join_to_the_whole(nbytes: int, chunk_nbytes: int) -> None:
    data = bytes(i % 251 for i in range(nbytes))

    def joined() -> Iterator[bytes]:
        for pieces in chunks.split(NUMBER, memoryview(data), chunk_nbytes):
            message = b"".join(pieces)
            chunk = pb.ExchangeRequest.FromString(message).chunk
            assert messages.only_field(message, len(message)) == (NUMBER, len(message) - len(chunk))
            yield chunk

    split = list(joined())
    assert b"".join(split) == data
    assert all(len(one) == chunk_nbytes and 0 < len(other) <= chunk_nbytes for one, other in pairwise(split))
