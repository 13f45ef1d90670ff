"""Calls by grpcio, over real sockets."""

from __future__ import annotations

import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeAlias

import grpc
import pytest
from grpc import _channel
from tests.servers import wait_until
from tests.unit.client.endpoints import SECONDS

import bngrad
from bngrad._credentials import Credentials, Security
from bngrad._deadline import Cancellation, Deadline
from bngrad._transports.grpcio import GrpcioTransport, begin_to_ask
from bngrad._transports.server_state import ServerState
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_wire import messages
from bngrad_wire.http2 import frames
from bngrad_wire.load_report import TEXT_HEADER, LoadReport

Answer: TypeAlias = Callable[[Iterator[bytes], grpc.ServicerContext], Iterator[bytes]]
"""Makes the messages of an answer from those of a request."""

NUMBER = 2
CHUNK = pb.ExchangeResponse.CHUNK_FIELD_NUMBER
SECURITY = Security(token="secret")  # noqa: S106 - used nowhere else
WAYS = ["short", "cancellable", "long", "exchange"]


class _Handler(grpc.GenericRpcHandler):
    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        return grpc.stream_stream_rpc_method_handler(self._answer)


class Transport:
    """A transport to a server, and what it has heard of that."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.state = ServerState()
        self.credentials = Credentials(SECURITY, target)
        self.channel = self.credentials.channel([])
        self.calls = GrpcioTransport(self.channel, target, self.credentials, self.state)

    def call(self, way: str, seconds: float = SECONDS, cancellation: Cancellation | None = None) -> bytes:
        """Makes a call in one of the `WAYS`, which have code of their own; returns the answer."""
        deadline = Deadline.after(seconds)
        if way == "exchange":
            return self.exchange(deadline, cancellation)[0]
        cancellation = cancellation or Cancellation(only_by_close=way != "cancellable")
        return self.calls.unary(
            "/service/Echo", [b"ab", b"c" * (2**17 if way == "long" else 1)], deadline, cancellation
        )

    def exchange(self, deadline: Deadline, cancellation: Cancellation | None = None) -> tuple[bytes, bytes]:
        """Sends tensors of five bytes and of 3 MiB; returns the answer without its tensor, and that tensor."""
        target = bytearray(5)
        answer = self.calls.exchange(
            "/service/Exchange", NUMBER, [b"he", b"ad"], [memoryview(b"x" * 5), memoryview(bytes(3 * 2**20))],
            [memoryview(target)], deadline, cancellation or Cancellation(),
        )  # fmt: skip
        return answer, bytes(target)


@contextmanager
def transport(answer: Answer) -> Iterator[Transport]:
    with ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads, handlers=[_Handler(answer)])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        made = Transport(f"127.0.0.1:{port}")
        try:
            yield made
        finally:
            made.channel.close()
            server.stop(None).wait()


def message(number: int, content: bytes) -> bytes:
    return messages.field_prefix(number, len(content)) + content


ANSWER = [message(NUMBER, b"answer"), message(CHUNK, b"hel"), message(CHUNK, b"lo")]


@pytest.mark.parametrize("way", WAYS)
def test_a_call_brings_the_token_and_its_deadline_and_notes_the_load(way: str) -> None:
    report, seen = LoadReport(1235, 0.25, 3.5), []

    def answer(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        seen.append((dict(context.invocation_metadata()).get("authorization"), context.time_remaining()))
        list(requests)
        context.set_trailing_metadata(((TEXT_HEADER, report.text()),))
        yield from ANSWER if way == "exchange" else [b"answer"]

    with transport(answer) as made:
        assert made.call(way, 20.0) == b"answer"
        assert made.state.load == report
    ((token, seconds),) = seen
    assert token == "Bearer secret"  # noqa: S105
    assert 0 < seconds <= 20.1, "gRPC's core rounds such a timeout up to 0.1 s"


def test_an_exchange_sends_tensors_in_chunks_of_a_mebibyte_and_fills_its_targets() -> None:
    came: list[bytes] = []

    def answer(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        came.extend(requests)
        yield from ANSWER

    with transport(answer) as made:
        assert made.exchange(Deadline.after(SECONDS)) == (b"answer", b"hello")
    assert came == [message(NUMBER, b"head"), message(CHUNK, b"x" * 5), *[message(CHUNK, bytes(2**20))] * 3]


@pytest.mark.parametrize("way", WAYS)
def test_a_call_that_ends_as_ok_without_a_response_is_an_internal_error(way: str) -> None:
    def answer(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        list(requests)
        yield from []

    with transport(answer) as made, pytest.raises(bngrad.InternalError, match=f"{made.target} (answered|did not send)"):
        made.call(way)


@contextmanager
def silence() -> Iterator[tuple[Transport, threading.Event, threading.Event]]:
    """Gives a transport to a server that does not answer, and events: a call has come, and it was ended."""
    came, ended = threading.Event(), threading.Event()

    def answer(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        context.add_callback(ended.set)
        came.set()
        assert ended.wait(2 * SECONDS)
        yield b""

    with transport(answer) as made:
        try:
            yield made, came, ended
        finally:
            ended.set()


@pytest.mark.parametrize("way", WAYS)
def test_a_silent_server_exceeds_the_deadline(way: str) -> None:
    with silence() as (made, _, _), pytest.raises(bngrad.DeadlineExceededError, match=r"timeout of 0\.1 s"):
        made.call(way, 0.1)


@pytest.mark.parametrize("way", ["unary", "exchange"])
def test_a_server_that_does_not_read_exceeds_the_deadline(way: str) -> None:
    window = struct.pack(">I", 2**30)
    settings = frames.frame(frames.SETTINGS, 0, 0, struct.pack(">HI", frames.INITIAL_WINDOW_SIZE, 2**30))
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        made = Transport(f"127.0.0.1:{listener.getsockname()[1]}")
        connected = grpc.channel_ready_future(made.channel)
        with listener.accept()[0] as sock:
            sock.sendall(settings + frames.frame(frames.WINDOW_UPDATE, 0, 0, window))
            connected.result(SECONDS)
            deadline, cancellation, tensor = Deadline.after(0.5), Cancellation(only_by_close=True), bytes(2**26)
            if way == "unary":
                call = threads.submit(made.calls.unary, "/service/Echo", [tensor], deadline, cancellation)
            else:
                exchange, view = made.calls.exchange, memoryview(tensor)
                call = threads.submit(exchange, "/service/Exchange", NUMBER, [], [view], [], deadline, cancellation)
            with pytest.raises(bngrad.DeadlineExceededError):
                call.result(SECONDS)
        made.channel.close()


@pytest.mark.parametrize("way", ["cancellable", "long", "exchange"])
def test_another_thread_ends_a_call(way: str) -> None:
    cancellation = Cancellation()
    with silence() as (made, came, ended), ThreadPoolExecutor(1) as threads:
        call = threads.submit(made.call, way, SECONDS, cancellation)
        assert came.wait(SECONDS)
        cancellation.cancel()
        with pytest.raises(bngrad.UnavailableError, match=made.target):
            call.result(SECONDS / 2)
        assert ended.wait(SECONDS)


@pytest.mark.parametrize("way", WAYS)
def test_closing_the_channel_ends_a_call(way: str) -> None:
    with silence() as (made, came, ended), ThreadPoolExecutor(1) as threads:
        call = threads.submit(made.call, way)
        assert came.wait(SECONDS)
        made.channel.close()
        with pytest.raises(bngrad.UnavailableError, match=made.target):
            call.result(SECONDS / 2)
        assert ended.wait(SECONDS)


@pytest.mark.parametrize("way", ["cancellable", "long", "exchange"])
def test_an_interrupt_ends_the_call_at_the_server(way: str) -> None:
    with silence() as (made, came, ended):

        class Interrupted(Cancellation):
            def attach(self, callback: object) -> None:
                assert came.wait(SECONDS)
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt) as raised:
            made.call(way, 3 * SECONDS, Interrupted())
        assert ended.wait(SECONDS)
        del raised  # kept the frames, and what they refer to, until here


@pytest.mark.parametrize("way", ["cancellable", "long", "exchange", "question"])
def test_a_channel_can_be_closed_after_ctrl_c_has_come_as_a_call_began(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """grpcio counts the call before it starts the thread that ends calls, for which closing waits."""
    start = _channel._run_channel_spin_thread

    def interrupted(state: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        start(state)

    def call(made: Transport) -> None:
        if way == "question":
            begin_to_ask(made.channel, "/service/Ask", made.credentials, SECONDS)
        else:
            made.call(way)

    monkeypatch.setattr(_channel, "_run_channel_spin_thread", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with silence() as (made, _, _), pytest.raises(KeyboardInterrupt):
            call(made)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("answers", "problem"),
    [
        ([], "did not send the response of the op"),
        ([message(NUMBER + 1, b"answer")], "did not send the response of the op"),
        ([b"\xff"], "did not send the response of the op"),
        ([*ANSWER, ANSWER[-1]], "sent more messages than the response has"),
        (ANSWER[:-1], "sent a malformed response: 2 bytes of chunks are missing"),
        ([ANSWER[0], ANSWER[0]], "sent a malformed response: "),
    ],
)
def test_an_exchange_whose_answer_is_malformed_is_an_internal_error(answers: list[bytes], problem: str) -> None:
    def answer(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        list(requests)
        yield from answers

    with transport(answer) as made, pytest.raises(bngrad.InternalError) as raised:
        made.call("exchange")
    assert str(raised.value).startswith(f"{made.target} {problem}")


@pytest.mark.parametrize("way", WAYS)
def test_a_status_is_an_error_with_its_message_and_without_its_frames(way: str) -> None:
    def answer(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        list(requests)
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "for a test")
        yield b""

    with transport(answer) as made, pytest.raises(bngrad.InvalidArgumentError, match=r"^for a test$") as raised:
        made.call(way)
    cause = raised.value.__cause__
    assert isinstance(cause, grpc.RpcError)
    assert cause.__traceback__ is None  # they refer to the tensors


def test_a_question_brings_the_token_and_ends_by_its_timeout() -> None:
    tokens = []

    def answer(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        tokens.append(dict(context.invocation_metadata()).get("authorization"))
        yield b""

    with transport(answer) as made:
        question = begin_to_ask(made.channel, "/service/Info", made.credentials, SECONDS)
        wait_until(question.done)
        assert question.code() is grpc.StatusCode.OK
    assert tokens == ["Bearer secret"]
    with silence() as (silent, _, _):
        question = begin_to_ask(silent.channel, "/service/Info", silent.credentials, 0.2)
        assert not question.done()
        wait_until(question.done)
        assert question.code() is grpc.StatusCode.DEADLINE_EXCEEDED
