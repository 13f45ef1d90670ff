"""Workers that die, clients that lose patience: nobody loses a request, nothing leaks."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path

import numpy as np
import psutil
import pytest
from tests.integration.conftest import (
    ONE_WORKER,
    descriptors_of,
    gate_of_workers,
    is_running,
    wait_until,
    worker_pid,
    worker_pids,
)
from tests.integration.problems import assert_gradients, random_inputs

import bngrad
from bngrad_kernels.spec import FLOAT32, Spec
from bngrad_server.embedded import EmbeddedServer

SPEC = Spec(FLOAT32, (32, 14, 14, 64), 3)
INPUTS = random_inputs(SPEC)


def test_a_request_survives_the_worker_that_held_it(own_server: EmbeddedServer) -> None:
    worker = worker_pid(own_server)
    os.kill(worker, signal.SIGSTOP)
    with bngrad.Client(own_server.target) as client, ThreadPoolExecutor() as threads:
        answer = threads.submit(client.fused_batch_norm_grad_v2, *INPUTS)
        with pytest.raises(FutureTimeoutError):
            answer.result(0.5)
        os.kill(worker, signal.SIGKILL)
        assert_gradients(SPEC, INPUTS, answer.result(60))
        assert client.server_info().devices[0].restarts == 1


def test_an_idle_worker_that_dies_is_replaced_before_anyone_asks(own_server: EmbeddedServer) -> None:
    with bngrad.Client(own_server.target) as client:
        os.kill(worker_pid(own_server), signal.SIGKILL)
        wait_until(lambda: client.server_info().devices[0].restarts == 1)
        wait_until(lambda: client.server_info().devices[0].state == "ready")
        assert_gradients(SPEC, INPUTS, client.fused_batch_norm_grad_v2(*INPUTS))


def test_a_request_that_kills_two_workers_is_given_up_and_the_server_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = gate_of_workers(tmp_path, monkeypatch)
    with (
        EmbeddedServer(options=ONE_WORKER) as server,
        bngrad.Client(server.target) as client,
        ThreadPoolExecutor() as threads,
    ):
        arena, worker = arena_of(server.process.pid), worker_pid(server)
        nbytes = arena.stat().st_size
        os.kill(worker, signal.SIGSTOP)
        answer = threads.submit(client.fused_batch_norm_grad_v2, *INPUTS)
        wait_until(lambda: client.server_info().requests == 1)
        with pytest.raises(FutureTimeoutError):
            answer.result(0.5)
        gate.touch()
        os.truncate(arena, 0)  # who reads the staged request now dies of SIGBUS
        os.kill(worker, signal.SIGCONT)
        wait_until(lambda: worker_pids(server) not in ([], [worker]))
        os.truncate(arena, nbytes)
        worker = worker_pid(server)
        server.process.send_signal(signal.SIGSTOP)  # lest the new one has computed it before it can be killed by it
        gate.unlink()
        wait_until(lambda: has_mapped_the_arena(worker))
        os.truncate(arena, 0)
        server.process.send_signal(signal.SIGCONT)
        wait_until(lambda: not is_running(worker))
        os.truncate(arena, nbytes)
        with pytest.raises(bngrad.InternalError, match="2 workers died while computing this request"):
            answer.result(60)
        assert_gradients(SPEC, INPUTS, client.fused_batch_norm_grad_v2(*INPUTS))


def arena_of(front: int) -> Path:
    return next(path for path, what in descriptors_of(front).items() if "bngrad-arena" in what)


def has_mapped_the_arena(worker: int) -> bool:
    return any("bngrad-arena" in mapped.path for mapped in psutil.Process(worker).memory_maps())


def test_a_deadline_ends_the_wait_and_frees_the_memory() -> None:
    with (
        EmbeddedServer(options=(*ONE_WORKER, "--arena-bytes", str(2**23))) as server,
        bngrad.Client(server.target) as client,
    ):
        worker = worker_pid(server)
        os.kill(worker, signal.SIGSTOP)
        for _ in range(4):  # each takes most of the arena
            with pytest.raises(bngrad.DeadlineExceededError):
                client.fused_batch_norm_grad_v2(*INPUTS, timeout=0.3)
        os.kill(worker, signal.SIGCONT)
        assert_gradients(SPEC, INPUTS, client.fused_batch_norm_grad_v2(*INPUTS))


def test_many_threads_share_a_client_and_get_the_bits_of_a_single_request(client: bngrad.Client) -> None:
    specs = [
        Spec(FLOAT32, (4, 7, 7, 32), 3),
        Spec(FLOAT32, (2, 5, 5, 3), 3),
        Spec(FLOAT32, (8, 14, 14, 16), 3),
        Spec(FLOAT32, (1, 1, 1, 1), 3),
    ]
    problems = [random_inputs(spec, seed) for seed, spec in enumerate(specs)]
    alone = [client.fused_batch_norm_grad_v2(*inputs) for inputs in problems]

    def check(index: int) -> None:
        which = index % len(specs)
        for ours, theirs in zip(client.fused_batch_norm_grad_v2(*problems[which]), alone[which], strict=True):
            np.testing.assert_array_equal(ours, theirs)

    with ThreadPoolExecutor(32) as threads:
        list(threads.map(check, range(1000)))
