"""Workers that die and deadlines that pass: no request is lost, nothing leaks."""

from __future__ import annotations

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
from tests.integration.problems import assert_gradients, random_inputs
from tests.raw_http2 import path_of, request
from tests.servers import (
    ONE_WORKER,
    PATIENT_SUPERVISOR,
    TIMEOUT_S,
    Transport,
    descriptors_of,
    hold_new_workers,
    is_running,
    run_at_start,
    wait_until,
    worker_pid,
    worker_pids,
)

import bngrad
from bngrad_cli.embedded import EmbeddedServer
from bngrad_kernels.spec import FLOAT32, Spec

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
    again = r"worker of device cpu was killed by SIGKILL\n.*worker of device cpu is ready again, [0-9.]+ s after"
    wait_until(lambda: re.search(again, own_server.stderr()) is not None)


def test_a_request_is_not_given_up_for_workers_that_die_before_they_have_read_it() -> None:
    with (
        EmbeddedServer(options=("--workers", "3", "--threads", "1", *PATIENT_SUPERVISOR)) as server,
        bngrad.Client(server.target) as client,
        ThreadPoolExecutor() as threads,
    ):
        workers = worker_pids(server)
        for worker in workers:
            os.kill(worker, signal.SIGSTOP)
            wait_until(lambda worker=worker: is_stopped(worker))  # type: ignore[misc]
        answer = threads.submit(client.fused_batch_norm_grad_v2, *INPUTS)
        with pytest.raises(FutureTimeoutError):
            answer.result(0.5)
        for worker in workers:  # the request moves from one to the next
            os.kill(worker, signal.SIGKILL)
            time.sleep(0.05)
        assert_gradients(SPEC, INPUTS, answer.result(60))


def is_stopped(pid: int) -> bool:
    """Whether every thread is blocked; until then one may still read what the test has sent."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return all((thread / "stat").read_text().rpartition(")")[2].split()[0] == "T" for thread in threads)


NO_MORE_THREADS = """
import signal, sys, threading
SIZES = {signal.SIGUSR1: 1 << 47, signal.SIGUSR2: 0}  # the first is more than a process can address
def obey():
    while number := signal.sigwait(SIZES):
        threading.stack_size(SIZES[number])
        print("obeyed", signal.Signals(number).name, file=sys.stderr, flush=True)
signal.pthread_sigmask(signal.SIG_BLOCK, SIZES)
threading.Thread(target=obey, daemon=True).start()
"""


@pytest.mark.parametrize("transport", ["stream", "unary"])
def test_a_server_that_cannot_start_threads_answers_with_those_it_has(
    transport: Transport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_at_start(NO_MORE_THREADS, tmp_path, monkeypatch)
    with (
        EmbeddedServer(options=ONE_WORKER) as server,
        bngrad.Client(server.target, transport=transport) as client,
        ThreadPoolExecutor(16) as threads,
    ):
        client.fused_batch_norm_grad_v2(*INPUTS)
        server.process.send_signal(signal.SIGUSR1)
        wait_until(lambda: "obeyed SIGUSR1" in server.stderr())
        os.kill(worker_pid(server), signal.SIGSTOP)  # keeps the first call running until the second one comes
        answers = [threads.submit(client.fused_batch_norm_grad_v2, *INPUTS, timeout=60) for _ in range(16)]
        wait_until(lambda: "can't start new thread" in server.stderr())
        os.kill(worker_pid(server), signal.SIGCONT)
        for answer in answers:
            assert_gradients(SPEC, INPUTS, answer.result())
        server.process.send_signal(signal.SIGUSR2)
        wait_until(lambda: "obeyed SIGUSR2" in server.stderr())
        assert_gradients(SPEC, INPUTS, client.fused_batch_norm_grad_v2(*INPUTS))
        assert server.stop() == 0


def test_an_idle_worker_that_dies_is_replaced_before_the_next_request(own_server: EmbeddedServer) -> None:
    with bngrad.Client(own_server.target) as client:
        os.kill(worker_pid(own_server), signal.SIGKILL)
        wait_until(lambda: client.server_info().devices[0].restarts == 1)
        wait_until(lambda: client.server_info().devices[0].state == "ready")
        assert_gradients(SPEC, INPUTS, client.fused_batch_norm_grad_v2(*INPUTS))


def test_a_request_that_kills_two_workers_is_given_up_and_the_server_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = hold_new_workers(tmp_path, monkeypatch)
    with (
        EmbeddedServer(options=ONE_WORKER) as server,
        bngrad.Client(server.target) as client,
        ThreadPoolExecutor() as threads,
    ):
        worker = worker_pid(server)
        arena = next(path for path, what in descriptors_of(server.process.pid).items() if "bngrad-arena" in what)
        nbytes = arena.stat().st_size
        os.kill(worker, signal.SIGSTOP)
        answer = threads.submit(client.fused_batch_norm_grad_v2, *INPUTS)
        wait_until(lambda: sum(client.server_info().batch_sizes) == 1)  # the front process has written all of it
        assert not answer.done()
        gate.touch()
        os.truncate(arena, 0)  # a worker that reads the staged request now dies of SIGBUS
        os.kill(worker, signal.SIGCONT)
        wait_until(lambda: worker_pids(server) not in ([], [worker]))
        os.truncate(arena, nbytes)
        worker = worker_pid(server)
        server.process.send_signal(signal.SIGSTOP)  # keeps the new worker from computing it before it can die of it
        gate.unlink()
        process = psutil.Process(worker)
        wait_until(lambda: any("bngrad-arena" in mapped.path for mapped in process.memory_maps()))
        os.truncate(arena, 0)
        server.process.send_signal(signal.SIGCONT)
        wait_until(lambda: not is_running(worker))
        os.truncate(arena, nbytes)
        with pytest.raises(bngrad.InternalError, match="2 workers died while computing this request"):
            answer.result(60)
        assert_gradients(SPEC, INPUTS, client.fused_batch_norm_grad_v2(*INPUTS))


def test_after_all_calls_end_at_once_as_many_are_accepted_again(own_server: EmbeddedServer) -> None:
    worker = worker_pid(own_server)
    message = request(4096).SerializeToString()
    with grpc.insecure_channel(own_server.target) as channel:
        grpc.channel_ready_future(channel).result(TIMEOUT_S)
        method: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(path_of("FusedBatchNormGradV2"))
        os.kill(worker, signal.SIGSTOP)
        for _ in range(5):
            calls = [method.future(message, timeout=0.5) for _ in range(128)]
            assert {call.code() for call in calls} == {grpc.StatusCode.DEADLINE_EXCEEDED}
        os.kill(worker, signal.SIGCONT)
        assert method(message, timeout=TIMEOUT_S)


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
