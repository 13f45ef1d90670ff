"""Tensors in memory that clients share with servers that have GPUs: a GPU has its copy before the request.

A CPU stands in for the GPUs.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc
import numpy as np
import pytest
from tests.integration.emulated_gpus import (
    ARENA,
    INPUTS,
    NBYTES,
    count,
    emulated_gpus,
    gradients,
    read_nbytes,
    wait_for,
)
from tests.integration.problems import assert_same_bits, random_inputs
from tests.integration.status_details import violations
from tests.servers import endpoints_of, python, wait_until, worker_pid
from tests.unit.client.calls import shared_pool

import bngrad
from bngrad_cli.embedded import EmbeddedServer
from bngrad_kernels.problem import Array
from bngrad_kernels.spec import FLOAT32, Spec
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_protos.v1 import batch_norm_grad_pb2_grpc as pb_grpc
from bngrad_wire.lease_protocol import CALLS

HOLD = """
import sys, threading
import numpy as np
import bngrad
client = bngrad.Client(sys.argv[1], transport="shared")
x, stats = np.ones((8, 40, 40, 24), np.float32), np.ones(24, np.float32)
client.fused_batch_norm_grad_v2(x, x, stats, stats, stats)
tensors = [client.send_ahead(x) for _ in range(2)]
print("ready", flush=True)
threading.Event().wait()
"""


@pytest.fixture(scope="module", autouse=True)
def gpus() -> Iterator[None]:
    with emulated_gpus():
        yield


def shared_client(server: EmbeddedServer) -> bngrad.Client:
    """A client whose shared memory the GPUs have mapped."""
    client = bngrad.Client(server.target, transport="shared")
    gradients(client, INPUTS.x)
    return client


def read_at_last(server: EmbeddedServer, call: Callable[[], object]) -> None:
    """Repeats a call until a GPU has read a copy: the client has its ticket a little later."""
    before = read_nbytes(server)

    def reads() -> bool:
        call()
        return read_nbytes(server) > before

    wait_until(reads)


def test_a_gpu_copies_a_tensor_in_shared_memory_before_its_request_and_drops_it_with_the_handle() -> None:
    with EmbeddedServer(device="cuda:0", options=ARENA) as server, shared_client(server) as client:
        plain = gradients(client, INPUTS.x)
        with client.send_ahead(INPUTS.x) as x:
            wait_for(server, f"GPU 0 copied {NBYTES} bytes ahead", 1)
            read_at_last(server, lambda: assert_same_bits(gradients(client, x), plain))
            before = read_nbytes(server)
            for uses in (1, 2):
                assert_same_bits(gradients(client, x), plain)
                assert read_nbytes(server) == before + uses * NBYTES
            assert_same_bits(gradients(client, INPUTS.x), plain)
            assert read_nbytes(server) == before + 2 * NBYTES
            assert not count(server, f"GPU 0 dropped {NBYTES} bytes")
        wait_for(server, f"GPU 0 dropped {NBYTES} bytes", 1)
        assert_same_bits(gradients(client, INPUTS.x), plain)


@pytest.mark.asyncio
async def test_the_asynchronous_client_has_tensors_in_shared_memory_copied_too() -> None:
    with EmbeddedServer(device="cuda:0", options=ARENA) as server:
        async with bngrad.aio.Client(server.target, transport="shared") as client:
            plain = await client.fused_batch_norm_grad_v2(*INPUTS)
            x = await client.send_ahead(INPUTS.x)
            wait_for(server, f"GPU 0 copied {NBYTES} bytes ahead", 1)
            while not read_nbytes(server):
                assert_same_bits(await client.fused_batch_norm_grad_v2(INPUTS.y_backprop, x, *INPUTS[2:]), plain)
        wait_for(server, f"GPU 0 dropped {NBYTES} bytes", 1)


def test_every_large_input_of_the_second_order_may_be_copied_from_shared_memory() -> None:
    y_backprop, x, scale, mean, variance = INPUTS
    tensors = (x[::-1].copy(), y_backprop, x)

    def call(third: object, dy: object, x: object) -> list[bytes]:
        outputs = client.fused_batch_norm_grad_grad(third, scale, mean, dy, x, scale, mean, variance)  # type: ignore[arg-type]
        return [output.tobytes() for output in outputs]

    with EmbeddedServer(device="cuda:0", options=ARENA) as server, shared_client(server) as client:
        plain = call(*tensors)
        handles = [client.send_ahead(tensor) for tensor in tensors]
        wait_for(server, f"copied {NBYTES} bytes ahead", 3)

        def reads_all() -> bool:
            before = read_nbytes(server)
            assert call(*handles) == plain
            return read_nbytes(server) == before + 3 * NBYTES

        wait_until(reads_all)


def test_requests_find_their_copies_in_shared_memory_on_any_gpu() -> None:
    with EmbeddedServer(device="cuda:0,cuda:1", options=ARENA) as server, shared_client(server) as client:
        plain = gradients(client, INPUTS.x)
        handles = [client.send_ahead(INPUTS.x) for _ in range(4)]
        wait_for(server, f"copied {NBYTES} bytes ahead", 4)
        assert [count(server, f"GPU {number} copied {NBYTES} bytes ahead") for number in (0, 1)] == [2, 2]
        for x in handles:
            read_at_last(server, lambda: assert_same_bits(gradients(client, x), plain))  # noqa: B023 - called here


def test_what_a_client_writes_once_it_needs_a_copy_no_longer_is_what_later_requests_see() -> None:
    with EmbeddedServer(device="cuda:0", options=ARENA) as server, shared_client(server) as client:
        x = client.empty(INPUTS.x.shape)
        for copies, elements in enumerate((INPUTS.x, INPUTS.x[::-1]), 1):
            x[...] = elements
            plain = gradients(client, np.array(x))
            with client.send_ahead(x) as handle:
                wait_for(server, f"copied {NBYTES} bytes ahead", copies)
                read_at_last(server, lambda: assert_same_bits(gradients(client, handle), plain))  # noqa: B023 - called here
            x[...] = INPUTS.y_backprop
            assert_same_bits(gradients(client, x), gradients(client, INPUTS.y_backprop))


def test_copies_end_with_their_client() -> None:
    with EmbeddedServer(device="cuda:0", options=ARENA) as server:
        with python(HOLD, server.target) as process:
            wait_for(server, f"GPU 0 copied {NBYTES} bytes ahead", 2)
            assert not count(server, f"GPU 0 dropped {NBYTES} bytes")
            process.send_signal(signal.SIGKILL)
            wait_for(server, f"GPU 0 dropped {NBYTES} bytes", 2)
        with shared_client(server) as client:
            x = client.send_ahead(INPUTS.x)
            wait_for(server, f"GPU 0 copied {NBYTES} bytes ahead", 3)
        wait_for(server, f"GPU 0 dropped {NBYTES} bytes", 3)
        del x


def test_copies_end_with_the_lease_of_their_memory() -> None:
    with EmbeddedServer(device="cuda:0", options=ARENA) as server, shared_client(server) as client:
        plain = gradients(client, INPUTS.x)
        with client.send_ahead(INPUTS.x) as x:
            wait_for(server, f"GPU 0 copied {NBYTES} bytes ahead", 1)
            lease = shared_pool(client)._regions[0]._socket  # type: ignore[union-attr]
            assert lease is not None
            lease.shutdown(socket.SHUT_RDWR)
            wait_for(server, f"GPU 0 dropped {NBYTES} bytes", 1)
            assert_same_bits(gradients(client, x), plain)
            assert read_nbytes(server) == 0


def test_requests_are_computed_from_shared_memory_where_their_copies_have_gone() -> None:
    """Those for which the GPU has no room any longer, and those of a worker that has died."""
    y_backprop, x, scale, mean, variance = random_inputs(Spec(FLOAT32, (8, 80, 80, 30), 3))
    options = (*ARENA, "--gpu-memory-bytes", "64MiB")  # a quarter of which has room for two copies
    with EmbeddedServer(device="cuda:0", options=options) as server, shared_client(server) as client:

        def call(x: Array | bngrad.AheadTensor) -> bngrad.FusedBatchNormGradV2:
            return client.fused_batch_norm_grad_v2(y_backprop, x, scale, mean, variance)

        plain = call(x)
        handles = [client.send_ahead(x) for _ in range(5)]
        wait_for(server, f"copied {x.nbytes} bytes ahead", 5)
        wait_for(server, f"dropped {x.nbytes} bytes", 3)
        for handle in handles:
            assert_same_bits(call(handle), plain)
        read_at_last(server, lambda: assert_same_bits(call(handles[-1]), plain))
        before = read_nbytes(server)
        os.kill(worker_pid(server), signal.SIGKILL)
        wait_until(lambda: client.server_info().devices[0].restarts == 1)
        for handle in handles:
            assert_same_bits(call(handle), plain)
        assert read_nbytes(server) == before


def tensor_at(
    key: bytes, offset: int, shape: tuple[int, ...] = INPUTS.x.shape, ticket: bytes | None = None
) -> pb.Tensor:
    location = pb.Location(region_key=key, offset=offset)
    return pb.Tensor(dtype=pb.DATA_TYPE_FLOAT32, shape=shape, location=location, ticket=ticket)


@contextmanager
def stock_client(server: EmbeddedServer) -> Iterator[pb_grpc.BatchNormGradServiceStub]:
    """A client without the SDK, at the server's Unix socket."""
    with grpc.insecure_channel(f"unix:{endpoints_of(server.target).local_directory}/{CALLS}") as channel:
        yield pb_grpc.BatchNormGradServiceStub(channel)


def test_a_stock_client_names_places_and_tickets_which_need_not_be_known() -> None:
    with (
        EmbeddedServer(device="cuda:0", options=ARENA) as server,
        shared_client(server) as client,
        stock_client(server) as stub,
    ):
        assert endpoints_of(server.target).copied_ahead_bytes == 256 * 1024
        plain = gradients(client, INPUTS.x)
        x = client.empty(INPUTS.x.shape)
        x[...] = INPUTS.x
        located = shared_pool(client).locate(x)  # type: ignore[union-attr]
        assert located is not None
        key, offset = located.place
        small = tensor_at(key, offset, shape=(64, 1))
        assert stub.SendAhead(iter([pb.SendAheadRequest(tensor=small)])).ticket == b""
        begin = pb.SendAheadRequest(tensor=tensor_at(key, offset))

        def x_backprop(ticket: bytes) -> bytes:
            rest = [pb.Tensor(dtype=pb.DATA_TYPE_FLOAT32, shape=each.shape, data=each.tobytes()) for each in INPUTS[2:]]
            y_backprop = pb.Tensor(dtype=pb.DATA_TYPE_FLOAT32, shape=INPUTS.x.shape, data=INPUTS.y_backprop.tobytes())
            request = pb.FusedBatchNormGradV2Request(
                y_backprop=y_backprop,
                x=tensor_at(key, offset, ticket=ticket),
                scale=rest[0],
                reserve_space_1=rest[1],
                reserve_space_2=rest[2],
            )
            return stub.FusedBatchNormGradV2(request).x_backprop.data

        ticket = stub.SendAhead(iter([begin])).ticket
        assert len(ticket) == 16
        wait_for(server, f"GPU 0 copied {NBYTES} bytes ahead", 1)
        for named, nbytes in ((ticket, NBYTES), (bytes(16), 0), (b"", 0)):
            before = read_nbytes(server)
            assert x_backprop(named) == plain.x_backprop.tobytes()
            assert read_nbytes(server) == before + nbytes
        assert stub.SendAhead(iter([pb.SendAheadRequest(forget=[ticket])])).ticket == b""
        wait_for(server, f"GPU 0 dropped {NBYTES} bytes", 1)
        assert x_backprop(ticket) == plain.x_backprop.tobytes()


def test_a_location_that_the_client_does_not_lease_is_refused() -> None:
    with (
        EmbeddedServer(device="cuda:0", options=ARENA) as server,
        shared_client(server) as client,
        stock_client(server) as stub,
    ):
        located = shared_pool(client).locate(client.empty(INPUTS.x.shape))  # type: ignore[union-attr]
        assert located is not None
        key, region_nbytes = located.region.key, located.region.nbytes
        for key_, offset, problem in (
            (bytes(16), 0, "has the key of no region that is leased"),
            (key, region_nbytes - NBYTES + 64, f"must end within the region's {region_nbytes} bytes"),
            (key, 1, "must begin at a multiple of 64 bytes, not at 1"),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                stub.SendAhead(iter([pb.SendAheadRequest(tensor=tensor_at(key_, offset))]))
            assert problem in violations(refused.value)["tensor"]
