"""Calls leave no reference cycles in the server, however they end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import grpc
import pytest
from tests.raw_http2 import path_of, request
from tests.servers import ONE_WORKER, TIMEOUT_S, run_at_start, targets_of, wait_until, worker_pid

from bngrad_cli.embedded import EmbeddedServer
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb

OP = path_of("FusedBatchNormGradV2")
EXCHANGE = path_of("Exchange")
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
NBYTES = 4096
MESSAGE = request(NBYTES).SerializeToString()
BEGUN = pb.ExchangeRequest(fused_batch_norm_grad_v2=request(NBYTES, whole=False)).SerializeToString()
CHUNK = pb.ExchangeRequest(chunk=bytes(NBYTES)).SerializeToString()
ROUNDS = 5
CONNECTIONS = 8
UNTIL_THEY_ARE_THERE_S = 0.05
NO_COLLECTOR = """
import collections, gc, signal, sys, threading
def collect():
    while signal.sigwait({signal.SIGUSR1}):
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kinds = collections.Counter(type(each).__qualname__ for each in gc.garbage)
        gc.set_debug(0)
        count = len(gc.garbage)
        gc.garbage.clear()
        gc.collect()
        print("garbage:", count, dict(kinds), file=sys.stderr, flush=True)
gc.disable()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # a handler might have to wait for the main thread
threading.Thread(target=collect, daemon=True).start()
"""
Call = Callable[[grpc.Channel, Iterator[bytes]], Any]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """A server that collects garbage only at SIGUSR1, and prints how much there was."""
    with pytest.MonkeyPatch.context() as patch:
        run_at_start(NO_COLLECTOR, tmp_path_factory.mktemp("site"), patch)
        with EmbeddedServer(options=ONE_WORKER) as server:
            yield server


@pytest.fixture(params=["tcp", "local"])
def channels(request: pytest.FixtureRequest, server: EmbeddedServer) -> Iterator[list[grpc.Channel]]:
    target = targets_of(server.target)[request.param]
    own = [("grpc.use_local_subchannel_pool", 1)]  # gives each channel its own connection
    with contextlib.ExitStack() as stack:
        channels = [stack.enter_context(grpc.insecure_channel(target, own)) for _ in range(CONNECTIONS)]
        for channel in channels:
            grpc.channel_ready_future(channel).result(TIMEOUT_S)
        yield channels


def garbage(server: EmbeddedServer) -> int:
    """Makes the server collect, and returns the number of objects."""
    before = counts(server)
    server.process.send_signal(signal.SIGUSR1)
    wait_until(lambda: len(counts(server)) > len(before))
    return counts(server)[-1]


def counts(server: EmbeddedServer) -> list[int]:
    return [int(count) for count in re.findall(r"garbage: (\d+) {.*}\n", server.stderr())]


def unary(message: bytes, channel: grpc.Channel, further: Iterator[bytes]) -> Any:
    method: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(OP)
    return method.future(message)


def unary_without_message(channel: grpc.Channel, further: Iterator[bytes]) -> Any:
    method: grpc.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(OP)
    return method.future(further)


def stream(path: str, messages: tuple[bytes, ...], channel: grpc.Channel, further: Iterator[bytes]) -> Any:
    method: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(path)
    return method(message for source in (messages, further) for message in source)


@pytest.mark.parametrize("is_computed", [True, False], ids=["computed", "not computed"])
@pytest.mark.parametrize(
    "call",
    [
        pytest.param(unary_without_message, id="no message"),
        pytest.param(partial(unary, b"garbage"), id="garbage"),
        pytest.param(partial(unary, MESSAGE), id="whole"),
        pytest.param(partial(stream, EXCHANGE, ()), id="exchange, no request"),
        pytest.param(partial(stream, EXCHANGE, (b"garbage",)), id="exchange, garbage"),
        pytest.param(partial(stream, EXCHANGE, (BEGUN, CHUNK)), id="exchange, begun"),
        pytest.param(partial(stream, EXCHANGE, (BEGUN, CHUNK, CHUNK)), id="exchange, whole"),
        pytest.param(partial(stream, "/grpc.health.v1.Health/Check", ()), id="health"),
        pytest.param(partial(stream, REFLECTION, ()), id="reflection"),
    ],
)
def test_calls_that_are_cancelled_refused_or_answered_leave_no_garbage(
    server: EmbeddedServer, channels: list[grpc.Channel], call: Call, is_computed: bool
) -> None:
    worker = worker_pid(server)
    cancelled = threading.Event()

    def nothing() -> Iterator[bytes]:
        cancelled.wait(TIMEOUT_S)
        yield from ()

    garbage(server)
    if not is_computed:
        os.kill(worker, signal.SIGSTOP)
    try:
        for _ in range(ROUNDS):
            running = [call(channel, nothing()) for channel in channels]
            time.sleep(UNTIL_THEY_ARE_THERE_S)
            for each in running:
                each.cancel()
    finally:
        os.kill(worker, signal.SIGCONT)
        cancelled.set()
    for channel in channels:  # once they are answered, earlier calls have ended
        unary(MESSAGE, channel, nothing()).result(TIMEOUT_S)
    assert garbage(server) < ROUNDS * CONNECTIONS, server.stderr().splitlines()[-1]
