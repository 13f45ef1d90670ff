"""The loop that fills a buffer from chunk messages, over messages that arrive whole or in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from google.protobuf.message import DecodeError
from tests.unit.wire.http2.peers import client

from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_wire.http2 import ServerCall
from bngrad_wire.messages import Buffer, ChunkError, MessageSource, WholeMessages, chunks, copy, receive_chunks

NUMBER = pb.ExchangeRequest.CHUNK_FIELD_NUMBER
DATA = bytes(range(256)) * 1024
UNKNOWN_FIELD = b"\xf8\x07\x01"

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


def parse(message: bytes) -> Buffer:
    parsed = pb.ExchangeRequest.FromString(message)
    if parsed.WhichOneof("part") != "chunk":
        raise LookupError("no chunk")
    return parsed.chunk


@pytest.mark.parametrize("chunk_nbytes", [1000, 64 * 1024, 100_000, len(DATA), 2 * len(DATA)])
def test_chunks_fill_the_target_whatever_their_size(send: Send, chunk_nbytes: int) -> None:
    source = send([b"".join(pieces) for pieces in chunks(NUMBER, memoryview(DATA), chunk_nbytes)])
    target = bytearray(len(DATA))
    receive_chunks(source, NUMBER, memoryview(target))
    assert target == DATA
    assert source.receive_message() is None


def test_each_target_has_chunks_of_its_own(send: Send) -> None:
    source = send([chunk(b""), chunk(b"a"), chunk(b""), chunk(b"bc"), chunk(b"defghijk"), b"rest"])
    first, second = bytearray(3), bytearray(8)
    for target in first, bytearray(), second:
        receive_chunks(source, NUMBER, memoryview(target))
    assert first + second == b"abcdefghijk"
    assert source.receive_message() == 4


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "5 bytes of chunks are missing"),
        ([chunk(b"1234")], "1 bytes of chunks are missing"),
        ([chunk(b"123456")], "a chunk has 1 bytes more than its tensor"),
        ([chunk(b"123"), chunk(bytes(100_000))], "a chunk has 99998 bytes more than its tensor"),
        ([b""], "a chunk must be the only field of its message"),
        ([chunk(b"12345") + UNKNOWN_FIELD], "a chunk must be the only field of its message"),
        ([pb.ExchangeRequest(fused_batch_norm_grad_v3={}).SerializeToString()], "a chunk must be the only field"),
    ],
)
def test_other_messages_are_errors(send: Send, messages: list[bytes], problem: str) -> None:
    source = send(messages)
    with pytest.raises(ChunkError, match=problem):
        receive_chunks(source, NUMBER, memoryview(bytearray(5)))


def test_a_message_with_other_fields_is_parsed(send: Send) -> None:
    large = DATA[3:]
    source = send([chunk(b"123") + UNKNOWN_FIELD, UNKNOWN_FIELD + chunk(large)])
    target = bytearray(len(DATA))
    receive_chunks(source, NUMBER, memoryview(target), parse=parse)
    assert target == b"123" + large


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (b"", LookupError),
        (b"\xff", DecodeError),
        (chunk(b"123456") + UNKNOWN_FIELD, ChunkError),
        (chunk(bytes(100)) + UNKNOWN_FIELD, ChunkError),
    ],
)
def test_a_message_that_has_no_fitting_chunk_is_an_error(send: Send, message: bytes, error: type[Exception]) -> None:
    source = send([message])
    with pytest.raises(error):
        receive_chunks(source, NUMBER, memoryview(bytearray(5)), parse=parse, max_parsed_nbytes=100)


@pytest.mark.parametrize("nbytes", [0, 1, 32 * 1024, 32 * 1024 + 1, 10**6])
def test_copy_copies_all_bytes(nbytes: int) -> None:
    source = (DATA * 4)[:nbytes]
    target = bytearray(nbytes)
    copy(memoryview(target), source)
    assert target == source
