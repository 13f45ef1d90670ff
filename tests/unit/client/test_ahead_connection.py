"""What servers are told of tensors in shared memory, ahead of the calls that need them."""

from __future__ import annotations

import socket
import threading

import numpy as np
import pytest
from tests.servers import wait_until
from tests.unit.client.calls import LARGE, SECONDS, located, right, selector_of, shared_pool, tensor
from tests.unit.client.endpoints import Server, server

import bngrad
from bngrad._deadline import ENDLESS, Cancellation
from bngrad.typing import Transport
from bngrad_wire.http2 import RpcError

X = tensor(LARGE)


@pytest.fixture
def gpu_server(served: Server) -> Server:
    """A server that says that its GPU copies tensors of 256 KiB and more."""
    served.endpoints.copied_ahead_bytes = 256 * 1024
    return served


def use_ticket(client: bngrad.Client, x: bngrad.AheadTensor, served: Server) -> bytes:
    """Makes calls until one has a ticket, and returns that."""

    def has_ticket() -> bytes:
        call(client, x)
        return served.tickets[-1]

    wait_until(has_ticket)
    return served.tickets[-1]


def call(client: bngrad.Client, x: bngrad.AheadTensor) -> None:
    stats = np.ones(LARGE[-1], np.float32)
    result = client.fused_batch_norm_grad_v2(X, x, stats, stats, stats)
    np.testing.assert_array_equal(result.x_backprop, np.asarray(x))


def wait_until_copied(served: Server, times: int = 1) -> None:
    wait_until(lambda: sum(message.HasField("tensor") for message in served.ahead) == times)


@pytest.mark.parametrize("transport", ["auto", "shared"])
def test_a_gpu_is_told_where_a_tensor_lies_and_calls_name_its_ticket(gpu_server: Server, transport: Transport) -> None:
    with bngrad.Client(gpu_server.target, transport=transport) as client:
        with client.send_ahead(X) as x:
            wait_until_copied(gpu_server)
            assert use_ticket(client, x, gpu_server) == b"1"
            (told,) = gpu_server.ahead
            assert (tuple(told.tensor.shape), told.tensor.data, told.chunk) == (LARGE, b"", b"")
            region, place = gpu_server.regions.hold("x", told.tensor.location, X.nbytes)
            gpu_server.regions.release(region)
            assert place.offset == told.tensor.location.offset
            right(client, X, gpu_server)
            assert gpu_server.tickets[-1] == b""
        wait_until(lambda: [list(message.forget) for message in gpu_server.ahead] == [[], [b"1"]])


def test_a_copy_goes_with_what_the_server_need_no_longer_keep(gpu_server: Server) -> None:
    with bngrad.Client(gpu_server.target) as client, client.send_ahead(X) as x:
        assert use_ticket(client, x, gpu_server) == b"1"
        selector_of(client).send_ahead(X, [b"1"], ENDLESS, Cancellation())
        assert [list(message.forget) for message in gpu_server.ahead] == [[], [b"1"]]


def test_a_handle_that_has_gone_is_forgotten(gpu_server: Server) -> None:
    with bngrad.Client(gpu_server.target) as client:
        x = client.send_ahead(X)
        wait_until_copied(gpu_server)
        assert use_ticket(client, x, gpu_server) == b"1"
        del x
        wait_until(lambda: [list(message.forget) for message in gpu_server.ahead] == [[], [b"1"]])


@pytest.mark.parametrize("transport", ["auto", "stream"])
def test_small_tensors_of_a_call_may_be_handles_too(served: Server, transport: Transport) -> None:
    stats = np.arange(LARGE[-1], dtype=np.float32)
    with bngrad.Client(served.target, transport=transport) as client:
        scale, mean, variance = (client.send_ahead(stats) for _ in range(3))
        result = client.fused_batch_norm_grad_v2(X, X, scale, mean, variance)
        np.testing.assert_array_equal(result.x_backprop, X)
        np.testing.assert_array_equal(result.scale_backprop, stats)


def test_a_handle_that_was_not_made_can_go() -> None:
    """Ctrl-C may come before its attributes are set."""
    with pytest.raises(TypeError):
        bngrad.AheadTensor()  # type: ignore[call-arg]


def test_an_array_in_shared_memory_is_told_as_it_lies(gpu_server: Server) -> None:
    with bngrad.Client(gpu_server.target) as client:
        array = located(client, LARGE)
        with client.send_ahead(array) as x:
            wait_until_copied(gpu_server)
            assert use_ticket(client, x, gpu_server) == b"1"
        pool = shared_pool(client)
        assert pool is not None
        place = pool.locate(array)
        assert place is not None
        location = gpu_server.ahead[0].tensor.location
        assert (location.region_key, location.offset) == place.place


def test_servers_without_gpus_are_told_nothing_and_no_server_of_small_tensors(served: Server) -> None:
    for least_nbytes in (0, X.nbytes + 1):
        served.endpoints.copied_ahead_bytes = least_nbytes
        with bngrad.Client(served.target) as client:
            right(client, X, served)
            connections = served.local.connections
            for _ in range(3):
                with client.send_ahead(X) as x:
                    wait_until(lambda: x._upload is not None and x._upload._place is not None)
                    call(client, x)
            assert served.local.connections == connections
    assert not served.ahead
    assert set(served.tickets) == {b""}


def test_a_copy_that_moved_has_no_ticket(gpu_server: Server) -> None:
    with bngrad.Client(gpu_server.target) as client, client.send_ahead(X) as x:
        wait_until_copied(gpu_server)
        use_ticket(client, x, gpu_server)
        pool = shared_pool(client)
        assert pool is not None
        lease = pool._regions[0]._socket
        assert lease is not None
        lease.shutdown(socket.SHUT_RDWR)
        wait_until(lambda: gpu_server.regions.kept_nbytes)
        call(client, x)
        assert gpu_server.tickets[-1] == b""


def test_calls_go_on_where_the_server_fails_to_copy() -> None:
    """It is not asked again for a while."""
    with server() as served:
        served.endpoints.copied_ahead_bytes = 1
        calls = []

        def fail() -> None:
            calls.append(1)
            raise RpcError(12, "no such call")

        served.on_ahead = fail
        with bngrad.Client(served.target) as client:
            for _ in range(3):
                with client.send_ahead(X) as x:
                    wait_until(lambda: x._upload is not None and x._upload._place is not None)
                    call(client, x)
            wait_until(lambda: calls == [1])
            assert set(served.tickets) == {b""}


def test_calls_send_their_tensors_where_the_server_takes_none_ahead(served: Server) -> None:
    """It is not asked again for a while."""
    failed = []

    def fail() -> None:
        failed.append(1)
        raise RpcError(12, "no such call")

    served.on_ahead = fail
    with bngrad.Client(served.target, transport="stream") as client:
        for _ in range(2):
            with client.send_ahead(X) as x:
                wait_until(lambda: x._upload is not None and x._upload._tensor is None)
                call(client, x)
    assert failed == [1]


def test_tensors_are_not_sent_ahead_by_grpcio(served: Server) -> None:
    served.endpoints.ClearField("local_directory")
    served.endpoints.ClearField("stream_port")
    with bngrad.Client(served.target) as client:
        client.server_info()
        assert selector_of(client).send_ahead(X, [], ENDLESS, Cancellation()) is None


def test_a_call_sends_itself_what_takes_longer_to_be_sent_ahead_than_the_clients_timeout(served: Server) -> None:
    released = threading.Event()

    def hold() -> None:
        released.wait(SECONDS)

    served.on_ahead = hold
    x, stats = tensor(LARGE), np.ones(LARGE[-1], np.float32)
    with bngrad.Client(served.target, transport="stream", timeout=0.5) as client, client.send_ahead(x) as handle:
        result = client.fused_batch_norm_grad_v2(X, handle, stats, stats, stats, timeout=SECONDS / 2)
        released.set()
        np.testing.assert_array_equal(result.x_backprop, x)


@pytest.mark.parametrize("transport", ["auto", "stream"])
def test_a_tensor_that_its_call_takes_in_another_layout_is_sent_by_the_call(
    served: Server, transport: Transport
) -> None:
    x, stats = np.moveaxis(tensor((4, 32, 32, 32)), -1, 1), np.ones(32, np.float32)
    with bngrad.Client(served.target, transport=transport) as client, client.send_ahead(x) as handle:
        wait_until(lambda: handle._upload is not None and handle._upload._place is not None)
        result = client.fused_batch_norm_grad_v2(x, handle, stats, stats, stats, data_format="NHWC")
        np.testing.assert_array_equal(result.x_backprop, x)


def test_calls_send_a_tensor_that_the_server_has_evicted_from_then_on(served: Server) -> None:
    came: list[str] = []

    def refuse_first(way: str) -> None:
        came.append(way)
        if len(came) == 1:
            raise RpcError(9, "it has the ticket of no tensor that is still here")

    served.on_arrival = refuse_first
    with bngrad.Client(served.target, transport="stream") as client, client.send_ahead(X) as x:
        wait_until(lambda: x._upload is not None and x._upload._place is not None)
        for _ in range(2):
            call(client, x)
        wait_until(lambda: [list(message.forget) for message in served.ahead] == [[], [b"1"]])
    assert came == ["tcp"] * 3


def test_a_tensor_whose_copy_cannot_be_reached_is_sent_by_its_call(served: Server) -> None:
    def die(way: str) -> None:
        if way == "shared":
            raise ConnectionError

    served.on_call = die
    with bngrad.Client(served.target) as client, client.send_ahead(X) as x:
        wait_until(lambda: x._upload is not None and x._upload.copy is not None)
        call(client, x)
    assert served.ways == ["local"]
