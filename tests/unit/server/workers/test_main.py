"""A slot of a worker and the front process's end of it: what is kept from batch to batch, and how failures are told."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.unit.server.scheduling.workers import SPEC, job

from bngrad_kernels.cpu import CpuBackend
from bngrad_kernels.problem import AnyProblem, Problem
from bngrad_kernels.spec import Spec
from bngrad_server.memory.layout import ARENA, Place, Task, aligned
from bngrad_server.memory.regions import Region
from bngrad_server.workers import main, worker_slot
from bngrad_server.workers.ahead_copies import AheadCopies
from bngrad_server.workers.ipc import MAX_PACKET_NBYTES, Report
from bngrad_server.workers.pinned_memory import PinnedMemory
from bngrad_server.workers.worker_slot import BusyTime, WorkerSlot

TIMEOUT_S = 20.0
STRIDE = aligned(SPEC.tensor_nbytes)
STATS_NBYTES = aligned(SPEC.stats_nbytes)
REGION = 1
MEMORY = Place(ARENA, 0), Place(ARENA, STRIDE), Place(ARENA, 2 * STRIDE)
"""Where y_backprop, x and x_backprop lie."""
STATS_OFFSET = 16 * STRIDE
UNAVAILABLE = """
import socket, sys
from bngrad_kernels.errors import DeviceUnavailableError
from bngrad_server.workers.main import _ending_process
with _ending_process(socket.socket(fileno=int(sys.argv[1])), "cuda:0"):
    raise DeviceUnavailableError("no" * 1_000_000)
"""
A_THREAD_FAILS = """
import socket, sys, threading
from bngrad_kernels.errors import DeviceFailedError
from bngrad_server.workers.main import _ending_process
def fail():
    with _ending_process(socket.socket(), "cuda:0"):
        raise ERROR
threading.Thread(target=fail).start()
sys.stdin.read()
"""


class Backend(CpuBackend):
    """The CPU, which fails for one epsilon."""

    fails_at = -1.0

    def run(self, problems: Sequence[AnyProblem]) -> None:
        if any(problem.spec.epsilon == self.fails_at for problem in problems):
            raise ZeroDivisionError
        super().run(problems)


class Worker:
    """A slot that is served by a thread of this process, with an arena that has one request's tensors."""

    def __init__(self) -> None:
        self.arena = np.random.default_rng(0).uniform(0.5, 1.5, 2**13).astype(np.float32)
        self.backend = Backend()
        self.slot = WorkerSlot(BusyTime())
        self.memory = PinnedMemory(self.arena.data.cast("B"), self.backend, 0)
        self.loop = main._SlotLoop(self.slot.theirs, self.backend, self.memory, AheadCopies(self.memory, self.backend))

    def compute(self, *specs: Spec, places: tuple[Place, ...] = MEMORY) -> list[str | None] | None:
        """Has the slot compute a batch, and returns the failures."""
        self.begin(*specs, places=places)
        return self.slot.finish()

    def begin(self, *specs: Spec, places: tuple[Place, ...] = MEMORY) -> None:
        assert self.slot.take()
        tasks = [Task(True, STATS_OFFSET, places)] * len(specs)
        self.slot.begin([(job(spec=spec, task=task), range(4)) for spec, task in zip(specs, tasks, strict=True)])

    def view(
        self, offset: int, shape: tuple[int, ...] = SPEC.shape
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        return np.ndarray(shape, np.float32, self.arena.data, offset)

    def expected(self, spec: Spec) -> Problem:
        """The problem that lies in the arena, computed elsewhere."""
        stats = (self.view(STATS_OFFSET + i * STATS_NBYTES, (4,)) for i in range(3))
        problem = Problem.allocate(spec, self.view(0), self.view(STRIDE), *stats)
        CpuBackend().run([problem])
        return problem


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    with ThreadPoolExecutor(1) as thread, closing(worker.slot._socket):
        served = thread.submit(worker.loop.serve)
        yield worker
        worker.slot.shut_down()
        served.result(TIMEOUT_S)
        worker.slot.theirs.close()


def with_epsilon(epsilon: float) -> Spec:
    return replace(SPEC, epsilon=epsilon)


def test_a_number_that_another_spec_had_before_means_the_new_one(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their tasks are the same to the byte, so that a problem that is kept would give the old results."""
    monkeypatch.setattr(worker_slot, "_MAX_SPECS", 1)
    for spec in [with_epsilon(1e-3), with_epsilon(1.0)] * 3:
        assert worker.compute(spec) is None
        np.testing.assert_array_equal(worker.view(2 * STRIDE), worker.expected(spec).x_backprop)


def test_few_problems_are_kept(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "_MAX_CACHED_PROBLEMS", 3)
    kept = []
    for i in range(2, 9):
        assert worker.compute(SPEC, places=(*MEMORY[:2], Place(ARENA, i * STRIDE))) is None
        kept.append(len(worker.loop._problems))
    assert kept == [1, 2, 3, 1, 2, 3, 1]


@pytest.mark.parametrize("order", [(1.0, 0.5), (0.5, 1.0)])
def test_of_a_batch_the_requests_fail_that_fail_alone(worker: Worker, order: tuple[float, float]) -> None:
    worker.backend.fails_at = 0.5
    failures = worker.compute(*map(with_epsilon, order))
    assert failures == ["ZeroDivisionError" if epsilon == 0.5 else None for epsilon in order]
    np.testing.assert_array_equal(worker.view(2 * STRIDE), worker.expected(with_epsilon(1.0)).x_backprop)


def uses_of(name: str) -> tuple[int, int]:
    """How often a file is mapped, and how many descriptors refer to it."""
    links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return Path("/proc/self/maps").read_text().count(name), sum(name in link for link in links)


def test_a_region_is_mapped_from_its_first_batch_until_it_is_taken_away(worker: Worker) -> None:
    region = os.memfd_create("region-of-main")
    try:
        os.truncate(region, 4096)
        worker.slot.change_region(REGION, Region(REGION, b"", region, 4096, ""))
        assert worker.compute(SPEC, places=(*MEMORY[:2], Place(REGION, 0))) is None
        assert uses_of("region-of-main") == (1, 1)
        written = np.frombuffer(os.pread(region, SPEC.tensor_nbytes, 0), np.float32).reshape(SPEC.shape)
        np.testing.assert_array_equal(written, worker.expected(SPEC).x_backprop)
        worker.slot.change_region(REGION, None)
        assert worker.compute(SPEC) is None
        assert uses_of("region-of-main") == (0, 1)
    finally:
        os.close(region)


def test_each_of_several_regions_that_come_together_is_its_own_memory(worker: Worker) -> None:
    numbers = (REGION, REGION + 1)
    regions = [Region(number, b"", os.memfd_create(f"region-{number}"), 4096, "") for number in numbers]
    try:
        worker.begin(SPEC)
        for region in regions:
            os.truncate(region.fd, region.nbytes)
            worker.slot.change_region(region.number, region)  # sent after the batch, in one packet
        assert worker.slot.finish() is None
        assert worker.compute(SPEC, places=(*MEMORY[:2], Place(REGION, 0))) is None
        expected = worker.expected(SPEC).x_backprop.tobytes()
        written = [os.pread(region.fd, SPEC.tensor_nbytes, 0) for region in regions]
        assert written == [expected, bytes(SPEC.tensor_nbytes)]
    finally:
        for region in regions:
            os.close(region.fd)


@pytest.mark.parametrize("error", ["ZeroDivisionError", "DeviceFailedError"])
def test_a_thread_that_cannot_go_on_ends_the_process(error: str) -> None:
    """Else its slot would compute nothing, without a word."""
    code = [sys.executable, "-c", A_THREAD_FAILS.replace("ERROR", error)]
    with subprocess.Popen(code, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.wait(TIMEOUT_S) == 1


def test_a_reason_of_any_length_is_told_before_the_process_ends() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        number = theirs.fileno()
        code = [sys.executable, "-c", UNAVAILABLE, str(number)]
        with subprocess.Popen(code, pass_fds=[number]) as process:
            theirs.close()
            ours.settimeout(TIMEOUT_S)
            told = ours.recv(2 * MAX_PACKET_NBYTES)
            assert told == (Report.FAILED + b"no" * MAX_PACKET_NBYTES)[:MAX_PACKET_NBYTES]
            assert process.wait(TIMEOUT_S) == 1
