"""Tenants that hold memory which others need: a server with a small arena, and two tokens."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
from tests.integration.status_details import retry_delay_s
from tests.monitoring.conftest import HTTP, http_of, samples
from tests.raw_http2 import path_of, request
from tests.security.conftest import LISTENERS, Guarded, ask
from tests.servers import wait_until

import bngrad
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_wire.token_format import new_token

MIB = 2**20
ARENA_NBYTES = 48 * MIB
WHOLE = ARENA_NBYTES // 3 - 2**16
"""The size of each of three tensors that take the whole arena."""
EIGHTH = ARENA_NBYTES // 24
MESSAGE_NBYTES = 16 * MIB
SOON_S = 15.0
"""Much less than the upload of the whole arena takes at the least rate, six minutes, or than a transfer may stand."""
TIMEOUT_S = 60.0


def stall() -> Iterator[int]:
    while True:
        time.sleep(1)
        yield 0


def drip() -> Iterator[int]:
    while True:
        time.sleep(1)
        yield 1


def trickle() -> Iterator[int]:
    while True:
        time.sleep(0.1)
        yield 2**14


@pytest.fixture(scope="module")
def guarded_by_many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Guarded, list[str]]]:
    """A server with the tokens of many tenants."""
    tokens = [new_token(f"tenant-{number}") for number in range(80)]
    options = ("--arena-bytes", str(ARENA_NBYTES), "--max-message-bytes", str(MESSAGE_NBYTES), *HTTP)
    guarded = Guarded(tmp_path_factory.mktemp("tenants"), client_ca=False, options=options)
    guarded.know(*(line for _, line in tokens))
    guarded.token = tokens[0][0]
    with guarded.running():
        yield guarded, [token for token, _ in tokens]


@pytest.fixture
def tenants(guarded_by_many: tuple[Guarded, list[str]]) -> tuple[Guarded, str]:
    """A server with alice's token, and that of bob, neither of which has lost a transfer."""
    guarded, tokens = guarded_by_many
    guarded.token = tokens.pop()
    return guarded, tokens.pop()


def as_(token: str) -> tuple[tuple[str, str]]:
    return (("authorization", f"Bearer {token}"),)


def run(client: bngrad.Client, nbytes: int, timeout_s: float = TIMEOUT_S) -> None:
    """Makes a call whose three large tensors have ``nbytes`` bytes each."""
    tensor, stats = np.ones((nbytes // 256, 1, 1, 64), np.float32), np.ones(64, np.float32)
    client.fused_batch_norm_grad_v2(tensor, tensor, stats, stats, stats, timeout=timeout_s)


@contextmanager
def whole_arena_announced(guarded: Guarded, listener: str, pace: Iterator[int]) -> Iterator[grpc.Call]:
    """An exchange of alice's that announces tensors which fill the arena, and sends them at a pace."""
    header = pb.ExchangeRequest(fused_batch_norm_grad_v2=request(WHOLE, whole=False)).SerializeToString()
    over = threading.Event()

    def messages() -> Iterator[bytes]:
        yield header
        for nbytes in pace:
            if over.is_set():
                return
            if nbytes:
                yield pb.ExchangeRequest(chunk=bytes(nbytes)).SerializeToString()

    with guarded.channel(listener) as channel:
        exchange: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(path_of("Exchange"))
        call = exchange(messages(), metadata=as_(guarded.token), timeout=10 * TIMEOUT_S)
        http = http_of(guarded.server)
        try:
            wait_until(lambda: guarded.info().requests == 1)
            wait_until(lambda: samples(http)["bngrad_arena_used_bytes", ()] >= 3 * WHOLE)  # it did not wait for others
            yield call
        finally:
            over.set()
            call.cancel()
    wait_until(lambda: guarded.info().requests == 0)


@pytest.mark.parametrize("pace", [stall, drip, trickle])
@pytest.mark.parametrize("listener", LISTENERS)
def test_an_announced_request_does_not_hold_the_arena(
    tenants: tuple[Guarded, str], listener: str, pace: type[Iterator[int]]
) -> None:
    guarded, bob = tenants
    with ExitStack() as stack:
        others = [stack.enter_context(guarded.client(token=bob, transport=each)) for each in ("unary", "stream")]
        for client in others:
            ask(client)  # connects
        call = stack.enter_context(whole_arena_announced(guarded, listener, pace()))
        begin = time.monotonic()
        for client in others:
            ask(client)
        for client in others:
            run(client, EIGHTH, SOON_S)
        assert time.monotonic() - begin < SOON_S
        assert retry_delay_s(call) > 0


@pytest.mark.parametrize("listener", LISTENERS)
def test_an_announced_request_takes_memory_as_its_data_arrives(tmp_path: Path, listener: str) -> None:
    def shared_nbytes() -> int:
        return int(psutil.Process(guarded.server.process.pid).memory_info().shared)

    def ten() -> Iterator[int]:
        yield from [MIB] * 10
        arrived.wait()

    arrived = threading.Event()
    guarded = Guarded(tmp_path, options=("--arena-bytes", str(3 * ARENA_NBYTES), *HTTP))
    with guarded.running():
        before = shared_nbytes()
        with whole_arena_announced(guarded, listener, ten()):
            wait_until(lambda: shared_nbytes() - before > 9 * MIB)
            time.sleep(0.5)
            assert shared_nbytes() - before < 32 * MIB
            arrived.set()


@pytest.mark.parametrize("listener", LISTENERS)
def test_the_arena_cannot_be_announced_again_at_once(tenants: tuple[Guarded, str], listener: str) -> None:
    guarded, bob = tenants
    header = pb.ExchangeRequest(fused_batch_norm_grad_v2=request(WHOLE, whole=False)).SerializeToString()
    with guarded.client(token=bob, transport="stream") as other:
        ask(other)  # connects
        with whole_arena_announced(guarded, listener, stall()):
            run(other, EIGHTH * 3, SOON_S)
    over = threading.Event()

    def messages() -> Iterator[bytes]:
        yield header
        over.wait(TIMEOUT_S)  # without its chunks, a call that has ended is malformed

    with guarded.channel(listener) as channel:
        exchange: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(path_of("Exchange"))
        call = exchange(messages(), metadata=as_(guarded.token), timeout=TIMEOUT_S)
        assert call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        over.set()
        assert "others needed memory that this client held" in call.details()
        assert retry_delay_s(call) > 0


@pytest.mark.parametrize("listener", LISTENERS)
def test_a_transfer_that_stands_still_ends_though_no_one_waits(tenants: tuple[Guarded, str], listener: str) -> None:
    with whole_arena_announced(tenants[0], listener, drip()) as call:
        begin = time.monotonic()
        assert call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert time.monotonic() - begin < SOON_S
        assert "the client is too slow: it has to move 131072 bytes a second" in call.details()


@pytest.mark.parametrize("listener", LISTENERS)
def test_a_slow_client_alone_is_served(tenants: tuple[Guarded, str], listener: str) -> None:
    guarded, _ = tenants
    nbytes = 2 * MIB

    def messages() -> Iterator[bytes]:
        yield pb.ExchangeRequest(fused_batch_norm_grad_v2=request(nbytes, whole=False)).SerializeToString()
        for _ in range(2 * nbytes // 2**18):
            time.sleep(0.5)
            yield pb.ExchangeRequest(chunk=bytes(2**18)).SerializeToString()

    with guarded.channel(listener) as channel:
        exchange: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(path_of("Exchange"))
        answers = list(exchange(messages(), metadata=as_(guarded.token), timeout=TIMEOUT_S))
    assert sum(map(len, answers)) > nbytes


@pytest.mark.parametrize("transport", ["unary", "stream"])
def test_whole_arena_requests_and_small_ones_both_make_progress(tenants: tuple[Guarded, str], transport: str) -> None:
    guarded, bob = tenants
    over = threading.Event()

    def repeat(nbytes: int, token: str) -> int:
        count = 0
        with guarded.client(token=token, transport="stream" if nbytes == WHOLE else transport) as client:
            while not over.is_set():
                run(client, nbytes)
                count += 1
        return count

    with ThreadPoolExecutor() as threads:
        jobs = [(WHOLE, guarded.token), (WHOLE, guarded.token), (EIGHTH, bob), (4096, bob)]
        counts = [threads.submit(repeat, *job) for job in jobs]
        time.sleep(5)
        over.set()
        done = [count.result() for count in counts]
    assert min(done) > 0
    assert done[-1] > 10


@pytest.mark.parametrize("listener", ["TCP", "local"])
def test_messages_take_bounded_memory_and_give_it_back(tenants: tuple[Guarded, str], listener: str) -> None:
    """Forty clients send the largest message at once; a fourth of the arena and a reserve are for messages."""
    guarded, bob = tenants
    front = psutil.Process(guarded.server.process.pid)
    message = request(MESSAGE_NBYTES // 2 - 2**16).SerializeToString()

    def private_nbytes() -> int:
        memory = front.memory_info()
        return int(memory.rss - memory.shared)

    with guarded.client(token=bob, transport="stream") as client:
        ask(client)
    before = most = private_nbytes()
    with ExitStack() as stack:
        calls = []
        for _ in range(40):
            channel = stack.enter_context(guarded.channel(listener))
            unary: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(path_of("FusedBatchNormGradV2"))
            calls.append(unary.future(message, metadata=as_(guarded.token), timeout=TIMEOUT_S))
        while not all(call.done() for call in calls):
            most = max(most, private_nbytes())
            time.sleep(0.01)
        codes = {call.code() for call in calls}
    assert grpc.StatusCode.OK in codes
    assert codes <= {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert most - before < 100 * MIB
    wait_until(lambda: private_nbytes() < before + 40 * MIB)


@pytest.mark.parametrize("listener", LISTENERS)
def test_a_message_beyond_the_limit_is_refused(tenants: tuple[Guarded, str], listener: str) -> None:
    guarded, _ = tenants
    with guarded.channel(listener) as channel:
        unary: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(path_of("FusedBatchNormGradV2"))
        call = unary.future(bytes(MESSAGE_NBYTES + 1), metadata=as_(guarded.token), timeout=TIMEOUT_S)
        assert call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def ahead(nbytes: int) -> Iterator[bytes]:
    """The messages that send a tensor ahead."""
    header = pb.Tensor(dtype=pb.DATA_TYPE_FLOAT32, shape=(nbytes // 256, 1, 1, 64))
    yield pb.SendAheadRequest(tensor=header).SerializeToString()
    for start in range(0, nbytes, MIB):
        yield pb.SendAheadRequest(chunk=bytes(min(MIB, nbytes - start))).SerializeToString()


def send_ahead(channel: grpc.Channel, token: str, nbytes: int) -> bytes:
    send: grpc.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(path_of("SendAhead"))
    answer = send(ahead(nbytes), metadata=as_(token), timeout=TIMEOUT_S)
    return pb.SendAheadResponse.FromString(answer).ticket


def test_who_hoards_tensors_sent_ahead_keeps_nothing_from_others(tenants: tuple[Guarded, str]) -> None:
    guarded, bob = tenants
    eighth, room = ARENA_NBYTES // 8, 4
    with guarded.channel("TCP") as channel, guarded.channel("TCP") as others:
        tickets = {send_ahead(channel, guarded.token, eighth) for _ in range(room)}
        assert {len(ticket) for ticket in tickets} == {16}
        assert len(tickets) == room
        with pytest.raises(grpc.RpcError) as raised:
            send_ahead(channel, guarded.token, eighth)
        assert isinstance(raised.value, grpc.Call)
        assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert retry_delay_s(raised.value) > 0

        send_ahead(others, bob, eighth)
        with guarded.client(token=bob, transport="stream") as other:
            run(other, WHOLE, SOON_S)


def test_who_announces_a_tensor_ahead_does_not_hold_the_arena(tenants: tuple[Guarded, str]) -> None:
    guarded, bob = tenants
    over = threading.Event()

    def announced() -> Iterator[bytes]:
        yield next(ahead(ARENA_NBYTES // 2))
        over.wait()

    with guarded.channel("TCP") as channel, guarded.client(token=bob, transport="stream") as other:
        ask(other)  # connects
        send: grpc.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(path_of("SendAhead"))
        call = send.future(announced(), metadata=as_(guarded.token), timeout=TIMEOUT_S)
        http = http_of(guarded.server)
        wait_until(lambda: samples(http)["bngrad_ahead_bytes", ()] == ARENA_NBYTES // 2)
        run(other, WHOLE, SOON_S)
        assert call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "others wait for the memory of this slow transfer" in call.details()
        assert retry_delay_s(call) > 0
        over.set()
