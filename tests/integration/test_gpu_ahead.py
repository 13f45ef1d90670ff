"""Tensors sent ahead to servers with GPUs: a GPU has its copy before the request. A CPU stands in for the GPUs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

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
from tests.kernels.cuda.devices import library_file
from tests.kernels.cuda.strict_environment import environment
from tests.servers import wait_until, worker_pid

import bngrad
from bngrad_cli.embedded import EmbeddedServer
from bngrad_kernels.spec import FLOAT32, Spec


@pytest.fixture(scope="module", autouse=True)
def gpus() -> Iterator[None]:
    with emulated_gpus():
        yield


def test_a_gpu_copies_a_tensor_before_its_request_reads_its_copy_and_drops_it_with_the_handle() -> None:
    with (
        EmbeddedServer(device="cuda:0", options=ARENA) as server,
        bngrad.Client(server.target, transport="stream") as client,
    ):
        plain = gradients(client, INPUTS.x)
        with client.send_ahead(INPUTS.x) as x:
            wait_for(server, f"GPU 0 copied {NBYTES} bytes ahead", 1)
            for uses in (1, 2):
                assert_same_bits(gradients(client, x), plain)
                assert read_nbytes(server) == uses * NBYTES
            assert not count(server, f"GPU 0 dropped {NBYTES} bytes")
        wait_for(server, f"GPU 0 dropped {NBYTES} bytes", 1)
        assert_same_bits(gradients(client, INPUTS.x), plain)


def test_every_large_input_of_the_second_order_may_be_on_the_gpu() -> None:
    y_backprop, x, scale, mean, variance = INPUTS
    tensors = (x[::-1].copy(), y_backprop, x)
    with (
        EmbeddedServer(device="cuda:0", options=ARENA) as server,
        bngrad.Client(server.target, transport="stream") as client,
    ):
        handles = [client.send_ahead(tensor) for tensor in tensors]
        wait_for(server, f"copied {NBYTES} bytes ahead", 3)
        answers = [
            client.fused_batch_norm_grad_grad(third, scale, mean, dy, x_, scale, mean, variance)
            for third, dy, x_ in (tensors, handles)
        ]
        assert [output.tobytes() for output in answers[0]] == [output.tobytes() for output in answers[1]]
        assert read_nbytes(server) == 3 * NBYTES


def test_copies_go_to_one_gpu_each_and_any_gpu_computes_their_requests() -> None:
    with (
        EmbeddedServer(device="cuda:0,cuda:1", options=ARENA) as server,
        bngrad.Client(server.target, transport="stream") as client,
    ):
        plain = gradients(client, INPUTS.x)
        handles = [client.send_ahead(INPUTS.x) for _ in range(4)]
        wait_for(server, f"copied {NBYTES} bytes ahead", 4)
        assert [count(server, f"GPU {number} copied {NBYTES} bytes ahead") for number in (0, 1)] == [2, 2]
        for x in handles:
            assert_same_bits(gradients(client, x), plain)
        assert read_nbytes(server) > 0
        for x in handles:
            x.close()
        for number in (0, 1):
            wait_for(server, f"GPU {number} dropped {NBYTES} bytes", 2)


def test_the_next_worker_computes_from_the_arena_what_had_a_copy_in_the_last_one() -> None:
    with (
        EmbeddedServer(device="cuda:0", options=ARENA) as server,
        bngrad.Client(server.target, transport="stream") as client,
        client.send_ahead(INPUTS.x) as x,
    ):
        wait_for(server, f"copied {NBYTES} bytes ahead", 1)
        plain = gradients(client, x)
        os.kill(worker_pid(server), signal.SIGKILL)
        wait_until(lambda: client.server_info().devices[0].restarts == 1)
        assert_same_bits(gradients(client, x), plain)
        assert read_nbytes(server) == NBYTES


def test_the_oldest_copies_give_way_where_a_gpu_has_no_room_for_more() -> None:
    y_backprop, x, scale, mean, variance = random_inputs(Spec(FLOAT32, (8, 80, 80, 30), 3))
    options = (*ARENA, "--gpu-memory-bytes", "64MiB")  # a quarter of which has room for two copies
    with (
        EmbeddedServer(device="cuda:0", options=options) as server,
        bngrad.Client(server.target, transport="stream") as client,
    ):
        plain = client.fused_batch_norm_grad_v2(y_backprop, x, scale, mean, variance)
        handles = [client.send_ahead(x) for _ in range(5)]
        wait_for(server, f"copied {x.nbytes} bytes ahead", 5)
        wait_for(server, f"dropped {x.nbytes} bytes", 3)
        for handle in handles:
            outputs = client.fused_batch_norm_grad_v2(y_backprop, handle, scale, mean, variance)
            assert_same_bits(outputs, plain)
        assert read_nbytes(server) == 2 * x.nbytes


def test_the_calls_of_cupy_have_the_types_that_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.environ["PYTHONPATH"].partition(os.pathsep)[2])
    for name, value in environment(library_file(), tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "copied_early"), prepend=os.pathsep)
    with (
        EmbeddedServer(device="cuda:0", options=ARENA) as server,
        bngrad.Client(server.target, transport="stream") as client,
    ):
        plain = gradients(client, INPUTS.x)
        by_self_test = count(server, "copied on the device")
        for uses in (1, 2, 3):
            with client.send_ahead(INPUTS.x) as x:
                wait_for(server, f"took {NBYTES} bytes from a pool", uses)
                assert_same_bits(gradients(client, x), plain)
            assert count(server, "copied on the device") == by_self_test + uses
        with bngrad.Client(server.target, transport="shared") as sharing:
            gradients(sharing, INPUTS.x)
            x = sharing.send_ahead(INPUTS.x)
            wait_for(server, f"took {NBYTES} bytes from a pool", 4)
            while count(server, "copied on the device") == by_self_test + 3:
                assert_same_bits(gradients(sharing, x), plain)
        assert client.server_info().devices[0].restarts == 0
