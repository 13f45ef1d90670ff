"""Workers that compute when a test tells them to, and jobs for them."""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from bngrad_kernels.spec import BFLOAT16, FLOAT32, Spec
from bngrad_server.errors import WorkerDiedError
from bngrad_server.memory.layout import Place, Task
from bngrad_server.scheduling.batcher import Batcher
from bngrad_server.scheduling.dispatch import run
from bngrad_server.scheduling.job import Job, JobState, KernelKey, Part

TIMEOUT_S = 20.0
SPEC = Spec(FLOAT32, (2, 3, 3, 4), channel_axis=3)
LARGE = Spec(FLOAT32, (8, 64, 64, 64), channel_axis=3)
TASK = Task(True, 0, (Place(0, 0),) * 3)
KEYS: list[KernelKey] = [
    (FLOAT32, True, True, 1),
    (BFLOAT16, True, True, 1),
    (FLOAT32, False, True, 1),
    (FLOAT32, True, False, 1),
]


def job(
    key: int = 0,
    nbytes: int = 100,
    is_abandoned: Callable[[], bool] = lambda: False,
    *,
    spec: Spec = SPEC,
    client: str = "client",
    deadline: float | None = None,
    task: Task = TASK,
) -> Job:
    return Job(spec, task, nbytes, KEYS[key], client=client, priority=0, deadline=deadline, is_abandoned=is_abandoned)


def large_job() -> Job:
    """A job worth splitting."""
    nbytes = 3 * LARGE.tensor_nbytes
    return Job(LARGE, TASK, nbytes, KEYS[0], client="a", priority=0, deadline=None, is_abandoned=lambda: False)


class GatedRun:
    """A batch; a test sets its outcome on the future."""

    def __init__(self) -> None:
        self.outcome = Future[list[str | None]]()
        self._done = os.eventfd(0)
        weakref.finalize(self, os.close, self._done)
        self.outcome.add_done_callback(lambda _: os.eventfd_write(self._done, 1))

    def fileno(self) -> int:
        return self._done

    def finish(self) -> list[str | None]:
        return self.outcome.result(TIMEOUT_S)


class GatedWorker:
    """Computes a batch once it is told to: `next_batch` returns its jobs, and the future to set the outcome on."""

    def __init__(self, slots: int = 1) -> None:
        self.slots = slots
        self.copies: set[int] = set()
        self._begun: list[tuple[list[Job], Future[list[str | None]]]] = []
        self._changed = threading.Condition()
        self.parts: list[range] = []
        self.killed = False

    def begin(self, parts: Sequence[Part]) -> GatedRun:
        begun = GatedRun()
        self.parts = [channels for _, channels in parts]
        with self._changed:
            self._begun.append(([job for job, _ in parts], begun.outcome))
            self._changed.notify()
        return begun

    def has_copy(self, number: int) -> bool:
        return number in self.copies

    def kill(self) -> None:
        self.killed = True

    def next_batch(self) -> tuple[list[Job], Future[list[str | None]]]:
        with self._changed:
            assert self._changed.wait_for(lambda: self._begun, TIMEOUT_S), "no batch was begun"
            return self._begun.pop(0)

    def compute(self) -> list[Job]:
        batch, outcome = self.next_batch()
        outcome.set_result([None] * len(batch))
        return batch

    def die(self) -> list[Job]:
        batch, outcome = self.next_batch()
        self.die_with(outcome)
        return batch

    def die_with(self, outcome: Future[list[str | None]]) -> None:
        """Dies, which the leader of one batch notices."""
        outcome.set_exception(WorkerDiedError("killed"))

    @property
    def is_untouched(self) -> bool:
        return not self._begun


def wait_for(futures: Iterable[Future[None]]) -> None:
    for future in futures:
        future.result(TIMEOUT_S)


def run_and_check(batcher: Batcher, job: Job) -> None:
    run(batcher, job)
    job.check()


class Requests:
    """Runs jobs in threads, in the order in which they are given."""

    def __init__(self, batcher: Batcher) -> None:
        self.batcher = batcher
        self._threads = ThreadPoolExecutor(32)

    def run(self, *jobs: Job) -> list[Future[None]]:
        futures = []
        for each in jobs:
            futures.append(self._threads.submit(run_and_check, self.batcher, each))
            wait_until(functools.partial(self._has_begun, each))
        return futures

    def offer(self, slots: int = 1) -> GatedWorker:
        """Returns a worker all of whose slots are free."""
        worker = GatedWorker(slots)
        for _ in range(slots):
            self.batcher.offer(worker)
        return worker

    def _has_begun(self, job: Job) -> bool:
        return job.state is not JobState.WAITING or job in list(self.batcher._queue.jobs)

    def end(self) -> None:
        self.batcher.close()
        self._threads.shutdown()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.0005)
