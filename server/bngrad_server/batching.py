"""The queue between requests and workers: whoever is free takes what waits, grouped by kernel.

There is no thread between the requests' threads and the workers. The thread of a request that finds a worker idle, or
is handed one, leads it: takes a batch, waits for the worker, wakes the other threads of the batch, and once its own
request is done hands the worker on. A thread hop costs more than a small gradient.
"""

from __future__ import annotations

import enum
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any, Protocol, TypeAlias

import numpy as np

from bngrad_kernels.spec import Spec
from bngrad_server.staging import Task

KernelKey: TypeAlias = tuple[np.dtype[Any], bool, bool]

MAX_ATTEMPTS = 3
"""A job is given up when this many workers have died of it."""
_LOOK_UP_S = 0.2
"""How often a waiting thread looks whether its client is still there."""


class ComputeError(Exception):
    """A request could not be computed, through no fault of its own."""


class WorkerDiedError(Exception):
    """The worker's process ended."""


class JobState(enum.Enum):
    """Where a job is."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


class Job:
    """A staged request on its way through a worker.

    Attributes:
        spec: What to compute.
        task: Where it lies.
        nbytes: The size of its tensors.
        kernel_key: Jobs of one key can share a launch: dtype, whether channels come last, mode.
        is_abandoned: Tells whether whoever asked has lost interest; such a job is not begun.
        state: Where it is.
        attempts: How many workers have got it so far.
        error: Why it could not be computed.
        worker: The worker that the thread of this job leads, or was handed to lead.
        on_end: Is called by whoever sees a job end that its own thread has left.
    """

    __slots__ = (
        *("spec", "task", "nbytes", "kernel_key", "is_abandoned"),
        *("state", "attempts", "error", "worker", "on_end", "_sleep"),
    )

    def __init__(
        self, spec: Spec, task: Task, nbytes: int, kernel_key: KernelKey, is_abandoned: Callable[[], bool]
    ) -> None:
        self.spec = spec
        self.task = task
        self.nbytes = nbytes
        self.kernel_key = kernel_key
        self.is_abandoned = is_abandoned
        self.state = JobState.WAITING
        self.attempts = 0
        self.error: Exception | None = None
        self.worker: Worker | None = None
        self.on_end: Callable[[], None] | None = None
        self._sleep = threading.Lock()  # the cheapest event there is: taken while there is nothing to wake up for
        self._sleep.acquire()

    @property
    def has_ended(self) -> bool:
        """Whether it was computed, or never will be."""
        return self.state is JobState.ENDED

    def wake(self) -> None:
        """Ends the thread's `sleep`, or its next one."""
        if self._sleep.locked():
            self._sleep.release()

    def sleep(self, timeout_s: float) -> None:
        """Waits for `wake`."""
        self._sleep.acquire(timeout=max(timeout_s, 0))


class Worker(Protocol):
    """What computes batches."""

    def run(self, batch: list[Job]) -> list[str | None]:
        """Computes jobs of one kernel key, and says for each why it failed, or None.

        Raises:
            WorkerDiedError: The process ended.
        """


class Batcher:
    """First come, first served; the job at the head decides the kernel, and others of that kernel ride along."""

    def __init__(self, max_jobs: int, max_bytes: int) -> None:
        self._max_jobs = max_jobs
        self._max_bytes = max_bytes
        self._mutex = threading.Lock()  # guards all that follows, and the state of every job
        self._queue: deque[Job] = deque()
        self._idle: list[Worker] = []
        self._closed = False

    def run(self, job: Job, deadline: float | None) -> None:
        """Has a worker compute a job, and returns when that is done.

        Args:
            job: What to compute.
            deadline: When the caller loses patience, on the monotonic clock; None means never.

        Raises:
            TimeoutError: The deadline passed.
            CancelledError: The caller has lost interest, or the batcher is closed.
            ComputeError: No worker could compute it.
        """
        is_abandoned = job.is_abandoned()  # in the job's own thread, which may look closest
        with self._mutex:
            if is_abandoned or self._closed:
                job.state = JobState.ENDED
                raise CancelledError
            self._queue.append(job)
            job.worker = self._idle.pop() if self._idle else None
        while True:
            if job.worker is not None:
                self._lead(job.worker, job)
            if job.has_ended:
                break
            rest_s = _LOOK_UP_S if deadline is None else min(_LOOK_UP_S, deadline - time.monotonic())
            job.sleep(rest_s)
            if job.worker is None and not job.has_ended:
                self._check_patience(job, deadline)
        if job.worker is not None:
            self.offer(job.worker)
        if job.error is not None:
            raise job.error

    def offer(self, worker: Worker) -> None:
        """Puts a worker to use that is free."""
        with self._mutex:
            self._hand_on(worker)

    def withdraw(self, worker: Worker) -> None:
        """Takes a worker out of use that has died."""
        with self._mutex:
            if worker in self._idle:
                self._idle.remove(worker)

    def when_untouched(self, job: Job, callback: Callable[[], None]) -> None:
        """Calls back once no worker can touch the job's memory any more: now, or when the worker is done with it."""
        with self._mutex:
            if job.state is JobState.RUNNING:
                job.on_end = callback
                return
        callback()

    def close(self) -> None:
        """Ends every job that waits, and takes no more."""
        with self._mutex:
            self._closed = True
            self._idle.clear()
            while self._queue:
                self._end(self._queue.popleft(), CancelledError())

    def _check_patience(self, job: Job, deadline: float | None) -> None:
        """Gives a job up that its caller does not want any longer; the worker that has got it runs to its end."""
        if deadline is not None and time.monotonic() >= deadline:
            reason: Exception = TimeoutError("the request was not computed in time")
        elif job.is_abandoned():
            reason = CancelledError()
        else:
            return
        if self._leave(job, reason):
            raise reason

    def _leave(self, job: Job, reason: Exception) -> bool:
        """Ends a job that waits, and says whether a worker has got it instead, which its thread does not wait for."""
        with self._mutex:
            if job.state is JobState.WAITING:
                self._queue.remove(job)
                self._end(job, reason)
            # Meanwhile it may have been handed a worker, which somebody else has to lead.
            worker, job.worker = job.worker, None
            if worker is not None:
                self._hand_on(worker)
            if job.state is JobState.RUNNING:
                job.on_end = _do_nothing  # until `when_untouched`: should the worker die first, nobody is there to lead
            return job.state is JobState.RUNNING

    def _lead(self, worker: Worker, own: Job) -> None:
        """Has the worker compute until the thread's own job has ended or nothing waits; then gives the worker on."""
        while True:
            with self._mutex:
                batch = self._take_batch() if own.state is JobState.WAITING else []
                if not batch:
                    own.worker = None
                    self._hand_on(worker)
                    return
            try:
                failures = worker.run(batch)
            except WorkerDiedError:
                self._rescue(batch, own)
                return
            except BaseException:
                self._rescue(batch, own)
                self._leave(own, CancelledError())
                raise
            with self._mutex:
                for job, failure in zip(batch, failures, strict=True):
                    self._end(job, None if failure is None else ComputeError(failure))

    def _hand_on(self, worker: Worker) -> None:
        """Has the first thread that waits lead the worker, if there is one; the mutex is held."""
        for job in self._queue:
            if job.worker is None:
                job.worker = worker
                job.wake()
                return
        if not self._closed:
            self._idle.append(worker)

    def _rescue(self, batch: list[Job], leader: Job) -> None:
        """Queues again, at the head, what a dead worker held, save for jobs that have cost too many workers."""
        with self._mutex:
            leader.worker = None
            for job in reversed(batch):
                if job.on_end is not None:
                    self._end(job, None)
                elif job.attempts >= MAX_ATTEMPTS:
                    self._end(job, ComputeError(f"{job.attempts} workers died while computing this request"))
                elif self._closed:
                    self._end(job, CancelledError())
                else:
                    job.state = JobState.WAITING
                    self._queue.appendleft(job)
            idle, self._idle = self._idle, []
            for worker in idle:
                self._hand_on(worker)

    def _take_batch(self) -> list[Job]:
        batch: list[Job] = []
        left: deque[Job] = deque()
        nbytes = 0
        while self._queue and len(batch) < self._max_jobs and nbytes < self._max_bytes:
            job = self._queue.popleft()
            # A job that a dying worker held runs alone: should it be the cause, it takes no other job with it.
            alone = job.attempts > 0
            if batch and (alone or batch[0].attempts or job.kernel_key != batch[0].kernel_key):
                left.append(job)
            elif job.is_abandoned():
                self._end(job, CancelledError())
            else:
                batch.append(job)
                nbytes += job.nbytes
        self._queue.extendleft(reversed(left))
        for job in batch:
            job.attempts += 1
            job.state = JobState.RUNNING
        return batch

    def _end(self, job: Job, error: Exception | None) -> None:
        job.state = JobState.ENDED
        job.error = error
        if job.on_end is None:
            job.wake()
        else:
            job.on_end()


def _do_nothing() -> None:
    pass
