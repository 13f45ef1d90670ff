"""Tensors that are sent ahead of the calls that need them: the same bits, and no memory that is not given back."""

from __future__ import annotations

import gc
import math
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tests.integration.problems import Case, random_inputs
from tests.integration.status_details import violations
from tests.monitoring.conftest import HTTP, http_of, samples
from tests.servers import Transport, endpoints_of, free_port, python, targets_of, wait_until
from tests.unit.client.calls import shared_pool

import bngrad
from bngrad._transports import endpoints
from bngrad_cli.embedded import EmbeddedServer
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_protos.v1 import batch_norm_grad_pb2_grpc as pb_grpc
from bngrad_wire.lease_protocol import CALLS

CASE = Case("v3", "NHWC", (16, 28, 28, 64))
INPUTS = random_inputs(CASE.spec())
NBYTES = CASE.spec().tensor_nbytes
ARENA_NBYTES = 8 * NBYTES
ROOM = 4
"""How many tensors may be ahead: as many as fit in half of the arena."""
OPTIONS = ("--arena-bytes", str(ARENA_NBYTES), "--workers", "1", *HTTP)
HOLD = """
import sys, threading
import numpy as np
import bngrad
client = bngrad.Client(sys.argv[1], transport="stream")
tensors = [client.send_ahead(np.ones((16, 28, 28, 64), np.float32)) for _ in range(2)]
print("ready", flush=True)
threading.Event().wait()
"""


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer(options=OPTIONS) as server:
        yield server


@pytest.fixture(scope="module")
def http(server: EmbeddedServer) -> str:
    return http_of(server)


@pytest.fixture
def client(server: EmbeddedServer, http: str) -> Iterator[bngrad.Client]:
    """A client over TCP; at its end the server must have nothing of it."""
    with bngrad.Client(server.target, transport="stream") as client:
        yield client
    wait_for_ahead(http, 0)


def ahead(http: str) -> float:
    """Returns how many tensors the server has that were sent ahead; not a number while one is being sent."""
    found = samples(http)
    tensors, nbytes = found["bngrad_ahead_tensors", ()], found["bngrad_ahead_bytes", ()]
    return tensors if nbytes == tensors * NBYTES else math.nan


def wait_for_ahead(http: str, tensors: int) -> None:
    wait_until(lambda: ahead(http) == tensors)


def test_a_stock_client_may_send_empty_chunks_and_errors_name_the_messages_fields(server: EmbeddedServer) -> None:
    begun = pb.SendAheadRequest(tensor=pb.Tensor(dtype=pb.DATA_TYPE_FLOAT32, shape=(1, 8)))
    empty, half = pb.SendAheadRequest(), pb.SendAheadRequest(chunk=bytes(16))
    with grpc.insecure_channel(targets_of(server.target)["tcp"]) as channel:
        send = pb_grpc.BatchNormGradServiceStub(channel).SendAhead
        assert len(send(iter([begun, empty, half, empty, half])).ticket) == 16
        for message, problem in (
            (begun, "a chunk must follow, not tensor"),
            (pb.SendAheadRequest(forget=[bytes(16)], chunk=bytes(16)), "a chunk must follow, not forget"),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                send(iter([begun, half, message]))
            assert violations(refused.value) == {"chunk": problem}


def gradients(client: bngrad.Client, x: Any, y_backprop: Any = INPUTS.y_backprop) -> tuple[bytes, ...]:
    result = client.fused_batch_norm_grad_v3(y_backprop, x, *INPUTS[2:], None)
    return tuple(each.tobytes() for each in result)


def bits(outputs: Sequence[Any]) -> list[bytes]:
    return [np.asarray(each).tobytes() for each in outputs]


@pytest.mark.parametrize("waits", [False, True], ids=["at once", "later"])
@pytest.mark.parametrize("transport", ["auto", "unary", "stream", "shared"])
def test_bits_are_the_same_over_every_transport(
    server: EmbeddedServer, http: str, transport: Transport, waits: bool
) -> None:
    with bngrad.Client(server.target, transport=transport) as client:
        plain = gradients(client, INPUTS.x)
        with client.send_ahead(INPUTS.x) as x:
            if waits and transport == "stream":
                wait_for_ahead(http, 1)
            assert gradients(client, x) == plain
            assert gradients(client, x) == plain


def test_every_op_takes_handles(client: bngrad.Client, http: str) -> None:
    y_backprop, x, scale, mean, variance = INPUTS
    tensors = (y_backprop, x, y_backprop[::-1].copy())
    handles = [client.send_ahead(tensor) for tensor in tensors]
    wait_for_ahead(http, 3)
    answers = []
    for dy, x_, third in (tensors, handles):
        answers.append([
            bits(client.fused_batch_norm_grad_v3(dy, x_, scale, mean, variance, None)),
            bits(client.fused_batch_norm_grad_v2(dy, x_, scale, mean, variance, is_training=False)),
            bits(client.batch_norm_training_backprop(x_, dy, mean, variance, scale, epsilon=1e-3)),
            bits(client.fused_batch_norm_grad_grad(third, scale, mean, dy, x_, scale, mean, variance)),
        ])  # fmt: skip
    assert answers[0] == answers[1]


def test_a_tensor_that_was_sent_is_not_sent_again(client: bngrad.Client, http: str) -> None:
    x = INPUTS.x.copy()
    plain = gradients(client, x)
    handle = client.send_ahead(x)
    wait_for_ahead(http, 1)
    x[:] = 0  # which callers must not do
    assert gradients(client, handle) == plain


def test_a_tensor_is_copied_into_shared_memory_once(server: EmbeddedServer) -> None:
    assert endpoints_of(server.target).copied_ahead_bytes == 0, "without a GPU the server need not know of it"
    with bngrad.Client(server.target, transport="shared") as client:
        plain = gradients(client, INPUTS.x)

        def uses_copy() -> bool:
            x = INPUTS.x.copy()
            handle = client.send_ahead(x)
            gradients(client, INPUTS.x)  # long enough for the copy, as a rule
            x[:] = 0  # which callers must not do
            return gradients(client, handle) == plain

        wait_until(uses_copy)


def test_channels_last_tensors_go_as_they_lie(client: bngrad.Client, http: str) -> None:
    y_backprop, x = (np.moveaxis(tensor, -1, 1) for tensor in INPUTS[:2])
    handle = client.send_ahead(x)
    assert handle.shape == x.shape
    wait_for_ahead(http, 1)
    for dy in (y_backprop, np.ascontiguousarray(y_backprop)):
        results = [
            client.fused_batch_norm_grad_v3(dy, each, *INPUTS[2:], None, data_format="NCHW") for each in (x, handle)
        ]
        assert bits(results[0]) == bits(results[1])


def test_more_than_there_is_room_for(client: bngrad.Client, http: str) -> None:
    plain = gradients(client, INPUTS.x)
    handles = [client.send_ahead(INPUTS.x) for _ in range(2 * ROOM)]
    wait_for_ahead(http, ROOM)
    assert [gradients(client, handle) for handle in reversed(handles)] == [plain] * len(handles)
    wait_for_ahead(http, ROOM)  # those that were refused have ended no lease
    handles.clear()
    wait_for_ahead(http, 0)


def test_requests_evict_what_they_have_no_room_beside(client: bngrad.Client, http: str) -> None:
    plain = gradients(client, INPUTS.x)
    handles = [client.send_ahead(INPUTS.x) for _ in range(ROOM)]
    wait_for_ahead(http, ROOM)
    before = samples(http)["bngrad_ahead_evicted_total", ()]
    large = np.ones((32, 28, 28, 64), np.float32)  # twice the size: three fill six eighths of the arena
    client.fused_batch_norm_grad_v3(large, large, *INPUTS[2:], None)
    wait_until(lambda: samples(http)["bngrad_ahead_evicted_total", ()] > before)
    assert [gradients(client, handle) for handle in handles] == [plain] * ROOM


def test_tensors_ahead_count_towards_what_a_client_may_have() -> None:
    """They take what its requests leave, and make room for these."""
    with (
        EmbeddedServer(options=(*OPTIONS, "--max-client-bytes", str(3 * NBYTES))) as server,
        bngrad.Client(server.target, transport="stream") as client,
    ):
        plain = gradients(client, INPUTS.x)
        handles = [client.send_ahead(INPUTS.x) for _ in range(ROOM)]
        wait_for_ahead(http_of(server), 3)
        assert gradients(client, INPUTS.x) == plain
        wait_for_ahead(http_of(server), 0)
        assert [gradients(client, handle) for handle in handles] == [plain] * ROOM


def test_memory_is_free_once_handles_have_gone(client: bngrad.Client, http: str) -> None:
    closed, dropped, used = (client.send_ahead(INPUTS.x) for _ in range(3))
    wait_for_ahead(http, 3)
    closed.close()
    closed.close()
    wait_for_ahead(http, 2)
    del dropped
    gc.collect()
    wait_for_ahead(http, 1)
    gradients(client, used)
    del used
    gc.collect()
    wait_for_ahead(http, 0)


@pytest.mark.parametrize("is_full", [False, True], ids=["copied", "not copied"])
def test_memory_is_free_where_the_next_tensor_is_to_be_copied_into_shared_memory(
    is_full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one is sent while the client does not reach the server's Unix socket."""
    monkeypatch.setattr(endpoints, "_BLOCKED_S", 0.1)
    with (
        EmbeddedServer(options=(*OPTIONS, "--shared-bytes", "64MiB")) as server,
        bngrad.Client(server.target) as client,
        bngrad.Client(server.target) as other,
    ):
        shared = other.empty((1,)) if is_full else None
        path = Path(endpoints_of(server.target).local_directory, CALLS)
        hidden = path.rename(path.with_name("hidden"))
        plain = gradients(client, INPUTS.x)
        first = client.send_ahead(INPUTS.x)
        wait_for_ahead(http_of(server), 1)
        hidden.rename(path)
        wait_until(lambda: gradients(client, INPUTS.x) == plain and shared_pool(client) is not None)
        assert ahead(http_of(server)) == 1
        first.close()
        second = client.send_ahead(INPUTS.x)
        wait_for_ahead(http_of(server), 0)
        assert gradients(client, second) == plain
        del shared


def test_memory_is_free_once_the_client_was_killed(server: EmbeddedServer, http: str) -> None:
    with python(HOLD, server.target) as process:
        wait_for_ahead(http, 2)
        process.send_signal(signal.SIGKILL)
        wait_for_ahead(http, 0)


def test_a_server_that_was_killed_loses_nothing() -> None:
    address = f"127.0.0.1:{free_port()}"
    with bngrad.Client(address, transport="stream") as client:
        with EmbeddedServer(address, options=OPTIONS) as first:
            plain = gradients(client, INPUTS.x)
            handles = [client.send_ahead(INPUTS.x) for _ in range(2)]
            wait_for_ahead(http_of(first), 2)
            first.process.kill()
        with EmbeddedServer(address, options=OPTIONS) as second:
            assert [gradients(client, handle) for handle in handles] == [plain] * 2
            handles.append(client.send_ahead(INPUTS.x))
            wait_for_ahead(http_of(second), 1)
            assert gradients(client, handles[-1]) == plain


def test_a_call_goes_to_the_server_that_has_its_tensor(server: EmbeddedServer, http: str) -> None:
    x = INPUTS.x.copy()
    with (
        EmbeddedServer(options=OPTIONS) as other,
        bngrad.Client([server.target, other.target], transport="stream") as client,
    ):
        others = http_of(other)
        plain = gradients(client, x)
        for _ in range(10):
            handle = client.send_ahead(x)
            wait_until(lambda: ahead(http) + ahead(others) == 1)
            x[:] = 0
            assert gradients(client, handle) == plain
            x[:] = INPUTS.x
            handle.close()
            wait_until(lambda: ahead(http) + ahead(others) == 0)
        handles = [client.send_ahead(x) for _ in range(4)]
        wait_until(lambda: ahead(http) + ahead(others) == 4)
        other.process.kill()
        assert [gradients(client, handle) for handle in handles] == [plain] * 4
    wait_for_ahead(http, 0)


def test_many_threads_share_handles(client: bngrad.Client) -> None:
    plain = gradients(client, INPUTS.x)
    shared = client.send_ahead(INPUTS.x)

    def run(i: int) -> bool:
        own = client.send_ahead(INPUTS.x)
        is_same = gradients(client, own) == gradients(client, shared) == plain
        if i % 2:
            own.close()
        return is_same

    with ThreadPoolExecutor(8) as executor:
        assert all(executor.map(run, range(40)))


@pytest.mark.asyncio
async def test_the_asynchronous_client(server: EmbeddedServer, http: str) -> None:
    async with bngrad.aio.Client(server.target, transport="stream") as client:
        plain = await client.fused_batch_norm_grad_v3(*INPUTS, None)
        x = await client.send_ahead(INPUTS.x)
        wait_for_ahead(http, 1)
        result = await client.fused_batch_norm_grad_v3(INPUTS.y_backprop, x, *INPUTS[2:], None)
        assert bits(result) == bits(plain)
    wait_for_ahead(http, 0)


def test_without_a_server_the_handle_stands_for_the_tensor() -> None:
    with bngrad.Client("local:") as client, client.send_ahead(INPUTS.x) as x:
        assert gradients(client, x) == gradients(client, INPUTS.x)
        assert np.shares_memory(np.asarray(x), INPUTS.x)


def test_closing_the_client_does_not_wait_for_uploads(server: EmbeddedServer) -> None:
    client = bngrad.Client(server.target, transport="stream")
    handles = [client.send_ahead(INPUTS.x) for _ in range(50)]
    client.close()
    with pytest.raises(bngrad.ClientClosedError):
        gradients(client, handles[0])
    with pytest.raises(bngrad.ClientClosedError):
        client.send_ahead(INPUTS.x)


def test_handles_that_no_call_takes(client: bngrad.Client, server: EmbeddedServer) -> None:
    x = client.send_ahead(INPUTS.x)
    assert repr(x) == "bngrad.AheadTensor(shape=(16, 28, 28, 64), dtype=float32)"
    with bngrad.Client(server.target) as other, pytest.raises(bngrad.InvalidArgumentError, match="of another client"):
        gradients(other, x)
    with pytest.raises(bngrad.InvalidArgumentError, match="shape") as raised:
        gradients(client, x, INPUTS.y_backprop[:1])
    assert raised.value.violations
    x.close()
    with pytest.raises(bngrad.InvalidArgumentError, match=r"x must be .* closed") as raised:
        gradients(client, x)
    assert [violation.field for violation in raised.value.violations] == ["x"]
    with pytest.raises(bngrad.InvalidArgumentError, match=r"x must have dtype float16, .* not float64"):
        client.send_ahead(np.ones(3))
    with pytest.raises(bngrad.InvalidArgumentError, match="x must be an array, not None"):
        client.send_ahead(None)  # type: ignore[arg-type]
