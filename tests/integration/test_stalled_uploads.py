"""Clients that die, stall or time out during a transfer: their memory is freed at once."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.integration.problems import Case, assert_gradients, random_inputs
from tests.raw_http2 import PREFACE, RawConnection, data, headers, path_of, prefixed, request
from tests.servers import TIMEOUT_S, python, targets_of, wait_until

import bngrad
from bngrad_cli.embedded import EmbeddedServer
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_wire import http2

CASE = Case("v2", "NHWC", (32, 28, 28, 64))
INPUTS = random_inputs(CASE.spec())
SMALL = Case("v2", "NHWC", (2, 5, 5, 3))
AT_ONCE_S = 20.0
"""Much less than the timeout of a client that has none."""
TO_GET_THERE_S = 4.0
"""A deadline that passes while an upload stands still: not before it has begun, even on a busy machine."""
ARENA_NBYTES = 4 * CASE.spec().tensor_nbytes  # for one request, not for two
UPLOAD = """
import sys, threading
import grpc
import numpy as np
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb, batch_norm_grad_pb2_grpc as pb_grpc
target, timeout = sys.argv[1], float(sys.argv[2]) or None
tensor = pb.Tensor(dtype=pb.DATA_TYPE_FLOAT32, shape=(32, 28, 28, 64))
stats = pb.Tensor(dtype=pb.DATA_TYPE_FLOAT32, shape=(64,), data=bytes(256))
header = pb.FusedBatchNormGradV2Request(
    y_backprop=tensor, x=tensor, scale=stats, reserve_space_1=stats, reserve_space_2=stats
)
def messages():
    yield pb.ExchangeRequest(fused_batch_norm_grad_v2=header)
    yield pb.ExchangeRequest(chunk=bytes(3_000_000))
    yield pb.ExchangeRequest(chunk=bytes(1_000_000))
    print("ready", flush=True)
    threading.Event().wait()
channel = grpc.insecure_channel(target)
grpc.channel_ready_future(channel).result()
next(pb_grpc.BatchNormGradServiceStub(channel).Exchange(messages(), timeout=timeout))
"""

CLOSE = """
import ctypes, sys, threading
import numpy as np
import bngrad
x, stats = np.ones((32, 28, 28, 64), np.float32), np.ones(64, np.float32)
def call(client):
    try:
        while True:
            client.fused_batch_norm_grad_v2(x, x, stats, stats, stats)
    except bngrad.ClientClosedError:
        pass
for moment in range(10):
    client = bngrad.Client(sys.argv[1], transport="stream")
    client.fused_batch_norm_grad_v2(x, x, stats, stats, stats)
    threads = [threading.Thread(target=call, args=(client,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    threading.Event().wait(0.05 * moment)
    ctypes.PyDLL(None).usleep(50_000)  # holds the GIL: no thread reads answers, and the sockets fill up
    client.close()
    for thread in threads:
        thread.join()
print("ready", flush=True)
threading.Event().wait()
"""


@pytest.fixture(scope="module")
def small_server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer(options=("--arena-bytes", str(ARENA_NBYTES))) as server:
        yield server


@pytest.fixture(params=["tcp", "local"])
def upload_target(request: pytest.FixtureRequest, small_server: EmbeddedServer) -> str:
    return targets_of(small_server.target)[request.param]


def ends_at_once(client: bngrad.Client) -> None:
    """Asserts that a request that needs the whole arena is served."""
    assert_gradients(CASE.spec(), INPUTS, CASE.run(client, INPUTS))


@pytest.fixture
def client(small_server: EmbeddedServer) -> Iterator[bngrad.Client]:
    """A client whose tensors are staged in the arena, with a timeout below the limit for uploads."""
    with bngrad.Client(small_server.target, transport="stream", timeout=AT_ONCE_S) as client:
        ends_at_once(client)
        yield client


def wait_until_staged(client: bngrad.Client) -> None:
    """Waits until the upload has taken its memory and a second large request finds none."""

    def is_staged() -> bool:
        try:
            client.fused_batch_norm_grad_v2(*INPUTS, timeout=0.3)
        except bngrad.DeadlineExceededError:
            return True
        return False

    wait_until(is_staged)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_memory_of_a_client_that_dies_during_an_upload_is_freed_at_once(
    client: bngrad.Client, upload_target: str, number: signal.Signals
) -> None:
    for _ in range(2):
        with python(UPLOAD, upload_target, 0) as uploading:
            wait_until_staged(client)
            uploading.send_signal(number)
            ends_at_once(client)


def test_a_stalled_upload_does_not_block_others(
    small_server: EmbeddedServer, client: bngrad.Client, upload_target: str
) -> None:
    inputs = random_inputs(SMALL.spec())
    with (
        python(UPLOAD, upload_target, 0),
        grpc.insecure_channel(small_server.target) as channel,
        bngrad.Client(small_server.target) as small,
    ):
        check = health_pb2_grpc.HealthStub(channel).Check  # type: ignore[attr-defined]
        wait_until_staged(client)
        for each in (client, small):
            SMALL.run(each, inputs)  # connects
            begin = time.monotonic()
            for _ in range(10):
                SMALL.run(each, inputs)
                assert check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING
            assert time.monotonic() - begin < AT_ONCE_S


def test_stalled_uploads_do_not_lower_the_estimated_rate() -> None:
    inputs, begun = random_inputs(SMALL.spec()), request(2**20, whole=False)
    message = prefixed(pb.ExchangeRequest(fused_batch_norm_grad_v2=begun).SerializeToString())
    with EmbeddedServer() as server, ExitStack() as standing:
        for _ in range(40):
            peer = standing.enter_context(RawConnection(targets_of(server.target)["tcp"]))
            assert peer.send(PREFACE + headers("Exchange") + data(message))
        with bngrad.Client(server.target, transport="shared", retries=False) as client:
            wait_until(lambda: client.server_info().requests == 40)
            for _ in range(5):
                SMALL.run(client, inputs)
                time.sleep(0.6)
            assert_gradients(CASE.spec(), INPUTS, CASE.run(client, INPUTS))


def test_the_deadline_of_a_stalled_upload_ends_it(client: bngrad.Client, upload_target: str) -> None:
    """The server enforces it: the client is stopped and cannot cancel."""
    with python(UPLOAD, upload_target, TO_GET_THERE_S) as uploading:
        os.kill(uploading.pid, signal.SIGSTOP)
        ends_at_once(client)


def test_a_client_learns_that_the_deadline_of_its_upload_has_passed(client: bngrad.Client, upload_target: str) -> None:
    with python(UPLOAD.replace("next(", "call = (") + REPORT, upload_target, TO_GET_THERE_S) as uploading:
        assert uploading.communicate(timeout=TIMEOUT_S)[0] == "DEADLINE_EXCEEDED\n"
    ends_at_once(client)


def test_the_deadline_includes_the_time_of_a_small_upload(server: EmbeddedServer) -> None:
    host, _, port = targets_of(server.target)["tcp"].rpartition(":")
    with closing(http2.ClientConnection(socket.create_connection((host, int(port)), TIMEOUT_S), "here")) as connection:
        call = connection.call(path_of("FusedBatchNormGradV2"), timeout_s=0.2)
        connection.flush()
        time.sleep(0.4)
        call.send_message(request(4096).SerializeToString())
        call.half_close()
        with pytest.raises(http2.RpcError) as raised:
            call.receive_message()
    assert raised.value.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]


def test_the_memory_of_calls_closed_during_their_answers_is_freed_at_once(server: EmbeddedServer) -> None:
    with python(CLOSE, server.target), bngrad.Client(server.target) as client:
        wait_until(lambda: client.server_info().requests == 0, AT_ONCE_S)


REPORT = """
try:
    next(call)
except grpc.RpcError as error:
    print(error.code().name, flush=True)
"""
