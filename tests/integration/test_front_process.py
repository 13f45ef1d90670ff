"""What the front process computes itself has the bits of a worker, and is within the same limits."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import psutil
import pytest
from tests.integration import second_order
from tests.integration.load import Load
from tests.integration.problems import random_inputs
from tests.raw_http2 import RawConnection, whole_call
from tests.servers import PATIENT_SUPERVISOR, TIMEOUT_S, TRANSPORTS, Transport, wait_until, worker_pid

import bngrad
from bngrad_cli.embedded import EmbeddedServer
from bngrad_kernels.spec import FLOAT32, Spec
from bngrad_wire.http2 import frames

SMALL, MEDIUM, BRIEF, LONG = (2, 3, 5, 7), (2, 50, 50, 5), (2, 64, 64, 30), (2, 80, 80, 64)
"""All but the last have less than 3 MiB of tensors."""

Ask = Callable[[float], list[bytes]]
"""Makes calls with a timeout, and returns the bits of the answers."""


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer(device="cpu", options=("--workers", "1", *PATIENT_SUPERVISOR)) as server:
        yield server


def inputs(shape: tuple[int, ...], seed: int = 0) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    x, y_backprop = rng.normal(size=(2, *shape)).astype(np.float32)
    scale, mean, variance = rng.random((3, shape[-1]), np.float32)
    return y_backprop, x, scale, mean, variance


def bits(client: bngrad.Client, tensors: tuple[Any, ...], timeout: float = TIMEOUT_S) -> list[bytes]:
    first = client.fused_batch_norm_grad_v2(*tensors, timeout=timeout)
    training = client.batch_norm_training_backprop(*tensors[1::-1], *tensors[3:], epsilon=1e-3, timeout=timeout)
    return [np.asarray(array).tobytes() for array in (*first, *training)]


def asking(client: bngrad.Client, shape: tuple[int, ...]) -> Ask:
    return lambda timeout: bits(client, inputs(shape), timeout)


def answers_without_worker(server: EmbeddedServer, ask: Ask) -> list[bytes]:
    """The answers while the worker is stopped, as soon as the front process has loaded the kernel."""
    until = time.monotonic() + TIMEOUT_S
    while True:
        ask(TIMEOUT_S)
        with stopped_worker(server):
            try:
                return ask(0.5)
            except bngrad.DeadlineExceededError:
                assert time.monotonic() < until


@contextlib.contextmanager
def stopped_worker(server: EmbeddedServer) -> Iterator[None]:
    worker = worker_pid(server)
    os.kill(worker, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(worker, signal.SIGCONT)


@pytest.mark.parametrize(
    ("transport", "shape"),
    [*itertools.product(TRANSPORTS, [SMALL, MEDIUM, BRIEF]), ("auto", LONG), ("shared", LONG)],
)
def test_a_small_request_or_one_in_shared_memory_needs_no_worker_and_has_the_bits_of_one(
    server: EmbeddedServer, transport: Transport, shape: tuple[int, ...]
) -> None:
    with bngrad.Client(server.target, transport=transport) as client, bngrad.Client("local:") as local:
        without = answers_without_worker(server, asking(client, shape))
        assert without == bits(local, inputs(shape))
        for seed in range(20):
            assert bits(client, inputs(shape, seed)) == bits(local, inputs(shape, seed))


@pytest.mark.parametrize("case", ["NHWC", "NCHW large"])
def test_the_second_order_in_shared_memory_needs_no_worker(server: EmbeddedServer, case: str) -> None:
    arguments = {**second_order.inputs_of(second_order.spec_of(case)), **second_order.arguments(case)}

    def answers(client: bngrad.Client, timeout: float) -> list[bytes]:
        return [np.asarray(each).tobytes() for each in client.fused_batch_norm_grad_grad(**arguments, timeout=timeout)]

    with bngrad.Client(server.target, transport="shared") as client, bngrad.Client("local:") as local:
        without = answers_without_worker(server, lambda timeout: answers(client, timeout))
        assert without == answers(local, TIMEOUT_S)


def test_a_large_request_waits_for_a_worker(server: EmbeddedServer) -> None:
    with bngrad.Client(server.target, transport="stream") as client:
        bits(client, inputs(LONG))
        answers_without_worker(server, asking(client, SMALL))
        with stopped_worker(server), pytest.raises(bngrad.DeadlineExceededError):
            bits(client, inputs(LONG), timeout=0.3)
        assert bits(client, inputs(LONG))


def test_beside_another_request_only_brief_ones_need_no_worker(server: EmbeddedServer) -> None:
    with (
        bngrad.Client(server.target, transport="shared") as client,
        bngrad.Client(server.target, transport="stream") as other,
        ThreadPoolExecutor() as pool,
    ):
        for shape in (BRIEF, LONG):
            answers_without_worker(server, asking(client, shape))
        with stopped_worker(server):
            waiting = pool.submit(bits, other, inputs(LONG))
            wait_until(lambda: client.server_info().requests == 1)
            bits(client, inputs(BRIEF), timeout=0.5)
            with pytest.raises(bngrad.DeadlineExceededError):
                bits(client, inputs(LONG), timeout=0.5)
        assert waiting.result()


@pytest.mark.parametrize("transport", ["shared", "stream"])
def test_the_server_knows_how_many_requests_wait_for_its_front_process(
    server: EmbeddedServer, transport: Transport
) -> None:
    with (
        bngrad.Client(server.target, transport=transport) as client,
        bngrad.Client(server.target) as other,
    ):
        with Load(client, [random_inputs(Spec(FLOAT32, (4, 16, 16, 32), 3), 1)], callers=8):
            wait_until(lambda: other.server_info().unread_connections >= 4)
        wait_until(lambda: other.server_info().unread_connections == 0)


def test_many_clients_in_shared_memory_get_the_bits_of_workers(server: EmbeddedServer) -> None:
    shapes = (SMALL, BRIEF, LONG) * 2
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool, bngrad.Client("local:") as local:
        clients = [stack.enter_context(bngrad.Client(server.target, transport="shared")) for _ in shapes]

        def repeat(client: bngrad.Client, shape: tuple[int, ...]) -> list[list[bytes]]:
            return [bits(client, inputs(shape)) for _ in range(50)]

        for shape, answers in zip(shapes, pool.map(repeat, clients, shapes), strict=True):
            assert answers == [bits(local, inputs(shape))] * 50


def test_the_front_process_unmaps_the_memory_of_a_client_that_has_gone(server: EmbeddedServer) -> None:
    def regions() -> int:
        return sum("bngrad-region" in each.path for each in psutil.Process(server.process.pid).memory_maps())

    for _ in range(2):
        with bngrad.Client(server.target, transport="shared") as client:
            answers_without_worker(server, asking(client, LONG))
            assert regions() > 0
        wait_until(lambda: regions() == 0)


def test_what_it_computes_is_counted(server: EmbeddedServer) -> None:
    with bngrad.Client(server.target) as client:
        answers_without_worker(server, asking(client, SMALL))
        before = client.server_info().batch_sizes[0]
        bits(client, inputs(SMALL))
        assert client.server_info().batch_sizes[0] - before == 2


def test_a_client_that_takes_no_answer_keeps_no_other_waiting(server: EmbeddedServer) -> None:
    with bngrad.Client(server.target) as client, contextlib.ExitStack() as stack:
        answers_without_worker(server, asking(client, SMALL))
        address = f"127.0.0.1:{client.server_info().stream_port}"
        closed_window = frames.PREFACE + frames.settings({frames.INITIAL_WINDOW_SIZE: 0})
        for _ in range(8):
            stack.enter_context(RawConnection(address)).send(whole_call(4096, closed_window))
        began = time.monotonic()
        for _ in range(50):
            bits(client, inputs(SMALL))
        assert time.monotonic() - began < 5
