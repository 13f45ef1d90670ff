"""Calls by the client's own HTTP/2, over real sockets."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from tests.servers import wait_until
from tests.unit.client.endpoints import SECONDS, CallAnswer, Endpoint, endpoint, message_of

import bngrad
from bngrad._credentials import Credentials, Security
from bngrad._deadline import Cancellation, Deadline
from bngrad._shared_memory.quarantine import AbandonedCall
from bngrad._transports import connection_pool
from bngrad._transports.connection_pool import NotConnectedError
from bngrad._transports.http2 import Http2Transport
from bngrad._transports.server_state import ServerState
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_wire import http2, messages
from bngrad_wire.http2 import ServerCall, header_block
from bngrad_wire.load_report import TEXT_HEADER, LoadReport

CHUNK = pb.ExchangeResponse.CHUNK_FIELD_NUMBER
TARGET = "server:1"
NUMBER = 2


def unary(client: Http2Transport, seconds: float = SECONDS, cancellation: Cancellation | None = None) -> bytes:
    return client.unary("/service/Echo", [b"ab", b"c"], Deadline.after(seconds), cancellation or Cancellation())


def exchange(
    client: Http2Transport, seconds: float = SECONDS, cancellation: Cancellation | None = None, nbytes: int = 5
) -> tuple[bytes, bytes]:
    """Sends two tensors; returns the response without its large tensor, and that tensor."""
    target = bytearray(nbytes)
    tensors = [memoryview(b"x" * nbytes), memoryview(b"y" * nbytes)]
    answer = client.exchange(
        "/service/Exchange", NUMBER, [b"he", b"ad"], tensors, [memoryview(target)],
        Deadline.after(seconds), cancellation or Cancellation(),
    )  # fmt: skip
    return answer, bytes(target)


def call_either(
    client: Http2Transport, kind: str, seconds: float = SECONDS, cancel: Cancellation | None = None
) -> None:
    (unary if kind == "unary" else exchange)(client, seconds, cancel)


def echo(call: ServerCall) -> None:
    """Answers a call with its request, and an exchange with its header and its first tensor."""
    messages = []
    while (message := message_of(call)) is not None:
        messages.append(message)
    if call.path.endswith("Exchange"):
        assert len(messages) in (1, 3)
        del messages[2:]
    for message in messages:
        call.send_message(message, more=True)
    call.end()


def replies(*messages: bytes) -> CallAnswer:
    """Answers every call with these messages."""

    def answer(call: ServerCall) -> None:
        while message_of(call) is not None:
            pass
        for message in messages:
            call.send_message(message, more=True)
        call.end()

    return answer


def chunk(data: bytes) -> bytes:
    return messages.field_prefix(CHUNK, len(data)) + data


HEADER = messages.field_prefix(NUMBER, 4) + b"head"


@contextmanager
def connected(answer: CallAnswer, path: str | None = None) -> Iterator[tuple[Http2Transport, Endpoint]]:
    with endpoint(answer, path) as peer, closing(Http2Transport(peer.address, TARGET)) as client:
        yield client, peer


@pytest.fixture(params=["unary", "exchange"])
def kind(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.mark.parametrize("family", ["tcp", "unix"])
def test_calls_and_exchanges_share_one_connection(family: str, tmp_path: Path) -> None:
    with connected(echo, f"{tmp_path}/socket" if family == "unix" else None) as (client, peer):
        assert client.is_reachable()
        for nbytes in (0, 1, 5, 70_000, 3_000_000):
            assert unary(client) == b"abc"
            assert exchange(client, nbytes=nbytes) == (b"head", b"x" * nbytes)
    assert peer.connections == 1


@pytest.mark.parametrize("chunks", [[5], [1, 4], [0, 3, 0, 2], [1, 1, 1, 1, 1]])
def test_a_response_may_come_in_chunks_of_any_size(chunks: list[int]) -> None:
    with connected(replies(HEADER, *(chunk(b"z" * nbytes) for nbytes in chunks))) as (client, _):
        assert exchange(client) == (b"head", b"zzzzz")
        assert exchange(client) == (b"head", b"zzzzz")


def test_a_response_may_have_several_large_tensors_each_in_its_own_chunks() -> None:
    targets = [bytearray(3), bytearray(0), bytearray(2)]

    def ask(client: Http2Transport) -> bytes:
        views = [memoryview(target) for target in targets]
        return client.exchange("/service/Exchange", NUMBER, [], [], views, Deadline.after(SECONDS), Cancellation())

    with connected(replies(HEADER, chunk(b"a"), chunk(b"bc"), chunk(b"de"))) as (client, _):
        assert ask(client) == b"head"
        assert b"".join(targets) == b"abcde"
    too_long = connected(replies(HEADER, chunk(b"abcd"), chunk(b"e")))
    with too_long as (client, _), pytest.raises(bngrad.InternalError, match="a chunk has 1 bytes more than its tensor"):
        ask(client)


def test_threads_get_their_own_answers_and_share_connections() -> None:
    with connected(echo) as (client, peer), ThreadPoolExecutor(8) as threads:

        def right(number: int) -> bool:
            request = str(number).encode()
            return client.unary("/service/Echo", [request], Deadline.after(SECONDS), Cancellation()) == request

        assert all(threads.map(right, range(400)))
        assert peer.connections <= 8


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "answered with nothing"),
        ([b"", b""], "sent more messages than the response has"),
        ([bytes(2**26 + 1)], "answered with 67108865 bytes"),
    ],
    ids=["nothing", "two", "too-long"],
)
def test_a_malformed_answer_to_a_call_is_an_internal_error(messages: list[bytes], complaint: str) -> None:
    with connected(replies(*messages)) as (client, _), pytest.raises(bngrad.InternalError, match=complaint):
        unary(client)


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "answered with nothing"),
        ([b""], "did not send the response of the op"),
        ([b"\xff\xff"], "did not send the response of the op"),
        ([chunk(b"zzzzz")], "did not send the response of the op"),
        ([messages.field_prefix(NUMBER + 1, 0)], "did not send the response of the op"),
        ([HEADER], "5 bytes of chunks are missing"),
        ([HEADER, chunk(b"zzzz")], "1 bytes of chunks are missing"),
        ([HEADER, HEADER], "a chunk must follow, not fused_batch_norm_grad_v2"),
        ([HEADER, b""], "a chunk must follow, not nothing"),
        ([HEADER, chunk(b"zzzzz") + b"z"], "the varint at byte 1 has no end"),
        ([HEADER, chunk(b"zzzzzz")], "a chunk has 1 bytes more than its tensor"),
        ([HEADER, chunk(b"zzz"), chunk(bytes(100_000))], "a chunk has 99998 bytes more than its tensor"),
        ([HEADER, chunk(b"zzzzz"), chunk(b"z")], "sent more messages than the response has"),
    ],
)
def test_a_malformed_answer_to_an_exchange_is_an_internal_error(messages: list[bytes], complaint: str) -> None:
    with connected(replies(*messages)) as (client, _), pytest.raises(bngrad.InternalError, match=complaint):
        exchange(client)


def test_a_connection_is_not_used_again_after_a_malformed_answer(kind: str) -> None:
    answers = iter([replies(b""), replies(b"", b""), echo])

    def answer(call: ServerCall) -> None:
        next(answers)(call)

    with connected(answer) as (client, _):
        with pytest.raises(bngrad.InternalError):
            exchange(client)
        with pytest.raises(bngrad.InternalError):
            unary(client)
        call_either(client, kind)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (1, bngrad.UnavailableError),
        (3, bngrad.InvalidArgumentError),
        (4, bngrad.DeadlineExceededError),
        (7, bngrad.BngradError),
        (8, bngrad.ResourceExhaustedError),
        (12, bngrad.UnimplementedError),
        (13, bngrad.InternalError),
        (14, bngrad.UnavailableError),
        (99, bngrad.InternalError),
    ],
)
def test_a_status_is_the_same_error_as_on_grpcio(kind: str, code: int, error: type[bngrad.BngradError]) -> None:
    with connected(lambda call: call.end(code, "näh")) as (client, peer):
        for _ in range(2):
            with pytest.raises(error, match="näh") as raised:
                call_either(client, kind)
            assert type(raised.value) is error
            assert isinstance(raised.value.__cause__, http2.RpcError)
        assert peer.connections <= 2


def test_a_connection_is_used_again_after_refusals_of_large_tensors() -> None:
    with connected(lambda call: call.end(8, "full")) as (client, peer):
        for _ in range(5):
            with pytest.raises(bngrad.ResourceExhaustedError):
                exchange(client, nbytes=5_000_000)
        assert peer.connections == 1


def test_the_fields_of_a_refusal_are_named(kind: str) -> None:
    detail = any_pb2.Any()
    violation = error_details_pb2.BadRequest.FieldViolation(field="x", description="x is wrong")
    detail.Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    details = status_pb2.Status(code=3, details=[detail]).SerializeToString()
    with connected(lambda call: call.end(3, "x is wrong", details)) as (client, _):
        with pytest.raises(bngrad.InvalidArgumentError, match=r"^x is wrong$") as refused:
            call_either(client, kind)
        assert refused.value.violations == (bngrad.FieldViolation("x", "x is wrong"),)


def test_an_error_in_the_middle_of_an_answer_is_raised() -> None:
    def fail(call: ServerCall) -> None:
        while message_of(call) is not None:
            pass
        call.send_message(HEADER)
        call.send_message(chunk(b"zz"))
        call.end(13, "broken")

    with connected(fail) as (client, _), pytest.raises(bngrad.InternalError, match="answered INTERNAL: broken"):
        exchange(client)


def test_a_connection_that_went_stale_is_replaced(kind: str) -> None:
    with connected(echo) as (client, peer):
        call_either(client, kind)
        peer.cut()
        call_either(client, kind)
        assert peer.connections == 2


def test_an_address_without_a_server_is_not_connected(kind: str, tmp_path: Path) -> None:
    with socket.socket() as bound:  # reserves the port without listening
        bound.bind(("127.0.0.1", 0))
        for address in (bound.getsockname(), f"{tmp_path}/socket", "/" + "x" * 200):
            client = Http2Transport(address, TARGET)
            assert not client.is_reachable()
            with pytest.raises(NotConnectedError):
                call_either(client, kind)


@pytest.mark.parametrize(("kind", "after"), [("unary", 0), ("unary", 1), ("exchange", 0), ("exchange", 2)])
def test_a_connection_lost_during_a_call_is_not_connected(kind: str, after: int) -> None:
    def answer(call: ServerCall) -> None:
        for message in [HEADER, chunk(b"zz")][:after]:
            call.send_message(message)
        raise ConnectionError

    with connected(answer) as (client, _), pytest.raises(NotConnectedError):
        call_either(client, kind)


def test_a_peer_that_speaks_no_http2_is_not_connected(kind: str) -> None:
    def talk(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock:
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
            sock.recv(2**16)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=talk, args=[listener])
        thread.start()
        with closing(Http2Transport(listener.getsockname(), TARGET)) as client, pytest.raises(NotConnectedError):
            call_either(client, kind)
        thread.join(SECONDS)


def test_a_cancellation_ends_a_handshake(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_pool, "_HANDSHAKE_TIMEOUT_S", 10 * SECONDS)
    cancellation = Cancellation()
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(1) as threads:
        credentials = Credentials(Security(bngrad.Tls()), "localhost:1")
        with closing(Http2Transport(silent.getsockname(), TARGET, credentials)) as client:
            waiting = threads.submit(call_either, client, kind, 20 * SECONDS, cancellation)
            with silent.accept()[0] as sock:
                assert sock.recv(1)
                cancellation.cancel()
                with pytest.raises(NotConnectedError):
                    waiting.result(SECONDS)


def test_a_stalled_peer_exceeds_the_deadline_that_it_was_told(kind: str) -> None:
    given: list[float | None] = []
    gone = threading.Event()
    timeouts = (1, 10)  # on a busy machine the first may pass before the call arrives

    def stand_still(call: ServerCall) -> None:
        given.append(call.timeout_s)
        while not call.cancelled():
            time.sleep(0.01)
        gone.set()
        raise ConnectionError

    with connected(stand_still) as (client, _):
        for timeout in timeouts:
            begin = time.monotonic()
            message = f"server:1 did not answer within the timeout of {timeout} s"
            with pytest.raises(bngrad.DeadlineExceededError, match=message):
                call_either(client, kind, timeout)
            assert 0.9 * timeout < time.monotonic() - begin < SECONDS
            if given:
                break
        assert gone.wait(SECONDS)
    assert given[0] is not None
    assert 0 < given[0] <= timeout


def test_an_answer_that_comes_bit_by_bit_exceeds_its_deadline() -> None:
    def trickle(call: ServerCall) -> None:
        while message_of(call) is not None:
            pass
        call.send_message(HEADER)
        while not call.cancelled():
            call.send_message(chunk(b"z"))
            time.sleep(0.01)
        raise ConnectionError

    with connected(trickle) as (client, _), pytest.raises(bngrad.DeadlineExceededError):
        exchange(client, 0.5, nbytes=100_000)


def test_an_answer_that_stops_late_exceeds_its_deadline_soon_after_that() -> None:
    timeout = 2.0
    may_end = threading.Event()

    def stop(call: ServerCall) -> None:
        while message_of(call) is not None:
            pass
        call.send_message(HEADER)
        until = time.monotonic() + 0.8 * timeout
        while time.monotonic() < until:
            call.send_message(chunk(b"z"))
            time.sleep(0.01)
        may_end.wait(SECONDS)
        raise ConnectionError

    with connected(stop) as (client, _):
        begin = time.monotonic()
        with pytest.raises(bngrad.DeadlineExceededError):
            exchange(client, timeout, nbytes=100_000)
        may_end.set()
        assert time.monotonic() - begin < 1.5 * timeout


def test_a_server_that_is_frozen_is_unavailable_at_every_address(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bngrad._transports.http2._LOOK_S", 0.01)
    may_end = threading.Event()

    class Frozen(ServerState):
        def is_lost(self, waited_s: float) -> bool:
            return True

    def stand_still(call: ServerCall) -> None:
        may_end.wait(SECONDS)
        raise ConnectionError

    with endpoint(stand_still) as peer, closing(Http2Transport(peer.address, TARGET, server=Frozen())) as client:
        with pytest.raises(bngrad.UnavailableError):
            call_either(client, kind)
        may_end.set()


def test_two_answers_to_a_call_that_come_at_once_are_an_internal_error() -> None:
    answers = iter([[b"a"], [b"a", b"b"]])

    def answer(call: ServerCall) -> None:
        while message_of(call) is not None:
            pass
        call.answer(next(answers))

    with connected(answer) as (client, _):
        assert unary(client) == b"a"
        with pytest.raises(bngrad.InternalError, match="answered with 2 messages, not one"):
            unary(client)


def test_each_report_of_a_servers_load_is_heard_once() -> None:
    older, newer = LoadReport(100.0, 0.5, 1.0), LoadReport(200.0, 0.5, 2.0)
    reports = iter([older])

    def answer(call: ServerCall) -> None:
        while (message := message_of(call)) is not None:
            call.send_message(message, more=True)
        texts = [(TEXT_HEADER, report.text()) for report in reports]
        call.end(trailers=header_block.encode(texts))

    state = ServerState()
    with endpoint(answer) as peer, closing(Http2Transport(peer.address, TARGET, server=state)) as client:
        unary(client)
        assert state.load == older
        state.hear(newer.text())  # by another connection
        unary(client)
        assert state.load == newer


def test_a_twin_has_the_same_credentials_and_a_connection_of_its_own(tmp_path: Path) -> None:
    tokens = []

    def note(call: ServerCall) -> None:
        tokens.append(call.metadata.get("authorization"))
        echo(call)

    credentials = Credentials(Security(token="alice"), "unix:/a")  # noqa: S106 - not a secret
    with (
        endpoint(note, f"{tmp_path}/socket") as peer,
        closing(Http2Transport(peer.address, TARGET, credentials)) as one,
    ):
        with closing(one.twin()) as twin:
            for each in (one, twin):
                unary(each)
        assert peer.connections == 2
    assert tokens == ["Bearer alice"] * 2


def test_only_some_large_exchanges_run_at_once_and_the_others_wait() -> None:
    with connected(echo) as (client, peer), ThreadPoolExecutor(150) as threads:
        answers = threads.map(lambda _: exchange(client, nbytes=1_000_000)[1], range(300))
        assert all(answer == b"x" * 1_000_000 for answer in answers)
        assert peer.connections <= 32


def test_an_exchange_that_waits_for_others_is_given_up_in_time_and_can_be_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bngrad._transports.http2._MAX_EXCHANGES", 1)
    monkeypatch.setattr("bngrad._transports.turns._LOOK_S", 3600.0)  # calls must be woken
    arrived, may_end, cancellation = threading.Event(), threading.Event(), Cancellation()

    def answer(call: ServerCall) -> None:
        arrived.set()
        may_end.wait(SECONDS)
        echo(call)

    with connected(answer) as (client, peer), ThreadPoolExecutor(3) as threads:
        running = threads.submit(exchange, client, nbytes=2**20)
        assert arrived.wait(SECONDS)
        with pytest.raises(bngrad.ResourceExhaustedError, match="1 calls before it still run") as refused:
            exchange(client, 0.1, nbytes=2**20)
        assert refused.value.retry_delay_s
        waiting = threads.submit(exchange, client, SECONDS, cancellation, 2**20)
        cancellation.cancel()
        with pytest.raises(NotConnectedError):
            waiting.result(SECONDS)
        small = threads.submit(exchange, client)
        wait_until(lambda: peer.connections == 2)  # it does not wait
        patient = threads.submit(exchange, client, 10 * SECONDS, nbytes=2**20)
        wait_until(lambda: client._turns.waiting == 1)
        may_end.set()
        for each in (running, small, patient):
            each.result(SECONDS)


def test_an_infinite_timeout_is_sent_as_none(kind: str) -> None:
    given: list[float | None] = []

    def note(call: ServerCall) -> None:
        given.append(call.timeout_s)
        echo(call)

    with connected(note) as (client, _):
        call_either(client, kind, math.inf)
        call_either(client, kind, 1e300)
        call_either(client, kind, 100)
    assert given[:2] == [None, None]
    assert given[2] == pytest.approx(100, abs=SECONDS)


def test_a_cancellation_from_another_thread_ends_a_call_that_waits(kind: str) -> None:
    arrived, gone = threading.Event(), threading.Event()

    def stand_still(call: ServerCall) -> None:
        arrived.set()
        while not call.cancelled():
            time.sleep(0.01)
        gone.set()
        raise ConnectionError

    cancellation = Cancellation()
    with connected(stand_still) as (client, _), ThreadPoolExecutor(1) as threads:
        call = threads.submit(call_either, client, kind, SECONDS, cancellation)
        assert arrived.wait(SECONDS)
        cancellation.cancel()
        with pytest.raises(NotConnectedError):
            call.result(SECONDS)
        assert gone.wait(SECONDS)
        with pytest.raises(NotConnectedError):
            call_either(client, kind, SECONDS, cancellation)


def test_the_server_is_told_at_once_that_a_call_in_shared_memory_was_given_up(tmp_path: Path) -> None:
    arrived, gone = threading.Event(), threading.Event()

    def stand_still(call: ServerCall) -> None:
        arrived.set()
        while not call.cancelled():
            time.sleep(0.01)
        gone.set()
        raise ConnectionError

    abandoned, cancellation = AbandonedCall(), Cancellation()
    with connected(stand_still, f"{tmp_path}/socket") as (client, _), ThreadPoolExecutor(1) as threads:
        call = threads.submit(client.unary, "/service/Echo", [b"a"], Deadline.after(SECONDS), cancellation, abandoned)
        assert arrived.wait(SECONDS)
        cancellation.cancel()
        with pytest.raises(NotConnectedError):
            call.result(SECONDS)
        assert gone.wait(SECONDS)
        wait_until(abandoned.is_over)


def test_a_call_in_shared_memory_whose_end_is_interrupted_is_over_once_the_server_has_closed_its_end(
    tmp_path: Path,
) -> None:
    arrived, may_end = threading.Event(), threading.Event()

    class Interrupted(Cancellation):
        def detach(self) -> None:
            raise KeyboardInterrupt

    def stand_still(call: ServerCall) -> None:
        arrived.set()
        may_end.wait(SECONDS)
        raise ConnectionError

    abandoned, cancellation = AbandonedCall(), Interrupted()
    with connected(stand_still, f"{tmp_path}/socket") as (client, _), ThreadPoolExecutor(1) as threads:
        call = threads.submit(client.unary, "/service/Echo", [b"a"], Deadline.after(SECONDS), cancellation, abandoned)
        assert arrived.wait(SECONDS)
        cancellation.cancel()
        with pytest.raises(KeyboardInterrupt):
            call.result(SECONDS)
        assert not abandoned.is_over()
        may_end.set()
        wait_until(abandoned.is_over)


def test_a_late_cancellation_does_not_affect_other_calls(kind: str) -> None:
    cancellation = Cancellation()
    with connected(echo) as (client, peer):
        call_either(client, kind, cancel=cancellation)
        cancellation.cancel()
        call_either(client, kind)
        assert peer.connections == 1


def test_cancelling_while_calls_end_does_not_affect_other_calls() -> None:
    with connected(echo) as (client, _), ThreadPoolExecutor(4) as threads:

        def try_cancelled(number: int) -> None:
            cancellation = Cancellation()
            timer = threading.Timer(number % 10 * 1e-4, cancellation.cancel)
            timer.start()
            try:
                unary(client, cancellation=cancellation)
            except NotConnectedError:
                assert cancellation.cancelled
            timer.join()

        done = [threads.submit(try_cancelled, number) for number in range(150)]
        for _ in range(300):
            assert unary(client) == b"abc"
        for each in done:
            each.result(SECONDS)


def test_closing_ends_idle_connections_and_keeps_none(kind: str) -> None:
    with connected(echo) as (client, peer):
        call_either(client, kind)
        client.close()
        call_either(client, kind)
        assert peer.connections == 2
        assert not client._connections._idle
