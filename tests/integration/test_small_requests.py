"""Small requests are computed in the front process, with the bits of a worker and within the same limits."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.raw_http2 import RawConnection, whole_call
from tests.servers import PATIENT_SUPERVISOR, TIMEOUT_S, TRANSPORTS, Transport, worker_pid

import bngrad
from bngrad_cli.embedded import EmbeddedServer
from bngrad_wire.http2 import frames

SMALL, MEDIUM, LARGE = (2, 3, 5, 7), (2, 50, 50, 5), (2, 64, 64, 7)


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


def answers_without_worker(server: EmbeddedServer, client: bngrad.Client, tensors: tuple[Any, ...]) -> list[bytes]:
    """The answers while the worker is stopped, as soon as the front process has loaded the kernel."""
    worker, until = worker_pid(server), time.monotonic() + TIMEOUT_S
    while True:
        bits(client, tensors)
        os.kill(worker, signal.SIGSTOP)
        try:
            return bits(client, tensors, timeout=0.5)
        except bngrad.DeadlineExceededError:
            assert time.monotonic() < until
        finally:
            os.kill(worker, signal.SIGCONT)


@pytest.mark.parametrize("transport", [each for each in TRANSPORTS if each != "shared"])
@pytest.mark.parametrize("shape", [SMALL, MEDIUM], ids=["small", "medium"])
def test_a_small_request_needs_no_worker_and_has_the_bits_of_one(
    server: EmbeddedServer, transport: Transport, shape: tuple[int, ...]
) -> None:
    """Even one that is large enough for shared memory."""
    with bngrad.Client(server.target, transport=transport) as client, bngrad.Client("local:") as local:
        without = answers_without_worker(server, client, inputs(shape))
        assert without == bits(local, inputs(shape))
        for seed in range(20):
            assert bits(client, inputs(shape, seed)) == bits(local, inputs(shape, seed))


def test_a_large_request_waits_for_a_worker(server: EmbeddedServer) -> None:
    with bngrad.Client(server.target) as client:
        bits(client, inputs(LARGE))
        answers_without_worker(server, client, inputs(SMALL))
        os.kill(worker_pid(server), signal.SIGSTOP)
        try:
            with pytest.raises(bngrad.DeadlineExceededError):
                bits(client, inputs(LARGE), timeout=0.3)
        finally:
            os.kill(worker_pid(server), signal.SIGCONT)
        assert bits(client, inputs(LARGE))


def test_small_requests_are_counted(server: EmbeddedServer) -> None:
    with bngrad.Client(server.target) as client:
        answers_without_worker(server, client, inputs(SMALL))
        before = client.server_info().batch_sizes[0]
        bits(client, inputs(SMALL))
        assert client.server_info().batch_sizes[0] - before == 2


def test_a_client_that_takes_no_answer_keeps_no_other_waiting(server: EmbeddedServer) -> None:
    with bngrad.Client(server.target) as client, contextlib.ExitStack() as stack:
        answers_without_worker(server, client, inputs(SMALL))
        address = f"127.0.0.1:{client.server_info().stream_port}"
        closed_window = frames.PREFACE + frames.settings({frames.INITIAL_WINDOW_SIZE: 0})
        for _ in range(8):
            stack.enter_context(RawConnection(address)).send(whole_call(4096, closed_window))
        began = time.monotonic()
        for _ in range(50):
            bits(client, inputs(SMALL))
        assert time.monotonic() - began < 5
