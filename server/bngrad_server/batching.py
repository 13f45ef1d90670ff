"""The queue between requests and workers: whoever is free takes what waits, grouped by kernel."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from bngrad_kernels.spec import Spec

KernelKey: TypeAlias = tuple[np.dtype[Any], bool, bool]


@dataclass(eq=False, slots=True)
class Job:
    """A staged request on its way to a worker.

    Attributes:
        spec: What to compute.
        offset: Where its block of the arena begins.
        nbytes: The size of that block.
        has_scale: Whether scale is given, rather than ones.
        done: Ends when the outputs are written, or with the reason why not.
        attempts: How many workers have got it so far.
    """

    spec: Spec
    offset: int
    nbytes: int
    has_scale: bool
    done: Future[None] = field(default_factory=Future)
    attempts: int = 0

    @property
    def kernel_key(self) -> KernelKey:
        """Jobs of one key can share a launch: dtype, whether channels come last, mode."""
        return self.spec.dtype, self.spec.inner == 1, self.spec.is_training

    def abandon(self) -> None:
        """Takes the job from the queue; one that a worker has already got runs to its end."""
        self.done.cancel()

    def give_up(self) -> None:
        """Ends the job, which no worker holds, as cancelled."""
        if not self.done.cancel():
            self.done.set_exception(CancelledError())


class Batcher:
    """First come, first served; the job at the head decides the kernel, and others of that kernel ride along."""

    def __init__(self, max_jobs: int, max_bytes: int) -> None:
        self._max_jobs = max_jobs
        self._max_bytes = max_bytes
        self._queue: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, job: Job) -> None:
        """Queues a job; ends it at once where the batcher is closed."""
        with self._changed:
            if self._closed:
                job.give_up()
            else:
                self._queue.append(job)
                self._changed.notify()

    def put_back(self, jobs: list[Job]) -> None:
        """Queues again, at the head, what a dead worker held; ends it where the batcher is closed."""
        with self._changed:
            self._queue.extendleft(reversed(jobs))
            if self._closed:
                self._give_up_all()
            self._changed.notify_all()

    def take(self, abandoned: Callable[[], bool] = lambda: False) -> list[Job]:
        """Waits for jobs and takes a batch.

        Args:
            abandoned: Tells whether the caller cannot run a batch any more; call `wake` when it changes.

        Returns:
            Jobs of one kernel key; none when the batcher is closed or the caller has abandoned it.
        """
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._queue or self._closed or abandoned())
                if self._closed or abandoned():
                    return []
                if batch := self._take_batch():
                    return batch

    def wake(self) -> None:
        """Lets every waiting `take` look again at whether it is abandoned."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Ends every `take`, and every job that still waits."""
        with self._changed:
            self._closed = True
            self._give_up_all()
            self._changed.notify_all()

    def _give_up_all(self) -> None:
        for job in self._queue:
            job.give_up()
        self._queue.clear()

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
            elif alone or job.done.set_running_or_notify_cancel():
                batch.append(job)
                nbytes += job.nbytes
        self._queue.extendleft(reversed(left))
        for job in batch:
            job.attempts += 1
        return batch
