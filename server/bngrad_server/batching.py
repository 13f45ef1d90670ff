"""Between requests and workers: whoever is free takes the next batch.

There is no thread between the requests' threads and the workers. The thread of a request that finds a worker idle, or
is handed one, leads it: takes a batch, waits for the worker, wakes the other threads of the batch, and once its own
request is done hands the worker on. A thread hop costs more than a small gradient.

Small requests have no thread each. One thread, see `bngrad_server.leading`, submits them all and leads the workers that
are idle, without ever waiting for one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager

from bngrad_kernels.problem import channel_cuts
from bngrad_server.crew import Batch, Part, Worker
from bngrad_server.fair_queue import FairQueue
from bngrad_server.jobs import Job, JobState

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 2
"""A job is given up when this many workers have died of it."""
_LOOK_UP_S = 0.2
"""How often a waiting thread looks whether its client is still there."""
_SPLIT_FROM_NBYTES = 1 << 21
"""Smaller jobs are not worth two workers."""
_BATCH_SIZES = 16
_BATCH_NBYTES = 41


class ComputeError(Exception):
    """A request could not be computed, through no fault of its own."""


class Batcher:
    """Brings jobs and workers together.

    Attributes:
        batch_sizes: How many batches were taken; at index k, those of 2**k to 2**(k + 1) - 1 jobs.
        batch_nbytes: Alike, for the sizes of their tensors in bytes; the first one has those without any as well.
        jobs_taken: How many jobs they had.
        nbytes_taken: How many bytes they had.
        reruns: How many jobs had to wait again since their worker died.
        quarantined: How many were given up since several workers had died of them.
        on_work: Is called, from any thread, where a worker is idle and a job is next that was submitted. It must not
            call the batcher.
    """

    def __init__(self, max_jobs: int, max_bytes: int, max_delay_s: float = 0.0, *, split: bool = True) -> None:
        """Has no worker yet.

        Args:
            max_jobs: The most jobs of a batch.
            max_bytes: A batch is closed once its jobs have so many bytes.
            max_delay_s: How long a job may wait for company while a worker is free, in seconds.
            split: Whether a large job is shared out to the workers that would be idle.
        """
        self.batch_sizes = [0] * _BATCH_SIZES
        self.batch_nbytes = [0] * _BATCH_NBYTES
        self.jobs_taken = self.nbytes_taken = self.reruns = self.quarantined = 0
        self.on_work = _do_nothing
        self._max_jobs = max_jobs
        self._max_delay_s = max_delay_s
        self._split = split
        self._mutex = threading.Lock()  # guards all that follows, and the state of every job
        self._queue = FairQueue(max_jobs, max_bytes)
        self._idle: list[Worker] = []
        self._expecting: list[Job] = []  # whose threads have a worker, and wait for company
        self._callbacks: list[Callable[[], None]] = []
        self._closed = False

    def run(self, job: Job) -> None:
        """Has a worker compute a job, and returns when that is done.

        Raises:
            TimeoutError: Its deadline passed.
            CancelledError: The caller has lost interest, or the batcher is closed.
            ComputeError: No worker could compute it.
        """
        with self._mutex:
            self._put(job)
            job.worker = self._idle.pop() if self._idle else None
        while True:
            if job.worker is not None:
                self._lead(job.worker, job)
            if job.has_ended:
                break
            rest_s = _LOOK_UP_S if job.deadline is None else min(_LOOK_UP_S, job.deadline - time.monotonic())
            job.sleep(rest_s)
            if job.worker is None and not job.has_ended:
                self.check_patience(job)
        if job.worker is not None:
            self.offer(job.worker)
        if job.error is not None:
            raise job.error

    def submit(self, job: Job) -> None:
        """Has a job wait that has no thread; `Job.on_end` is called when it has ended, unless it is left before.

        Raises:
            CancelledError: The batcher is closed.
        """
        with self._mutex:
            self._put(job)

    def begin_batches(self) -> list[Batch]:
        """Has idle workers begin what waits; each batch goes to `end_batch`, once no worker is busy with it."""
        if not self._idle or not len(self._queue) or self.rest_of_delay() > 0:
            return []
        batches, begun = [], []
        with self._locked():
            while self._idle and (jobs := self._take_batch()):
                batches.append(Batch(jobs, self._shares(self._idle.pop(), jobs)))
        for batch in batches:
            try:
                batch.begin()
                begun.append(batch)
            except Exception:
                logger.exception("a batch could not be begun")
                self.end_batch(batch)
        return begun

    def end_batch(self, batch: Batch) -> None:
        """Ends the jobs of a batch, or has them wait again if a worker died; frees the workers."""
        if batch.dead:
            self._rescue(batch.jobs, free=batch.alive)
            return
        with self._locked():
            self._end_all(batch)
            if not self._closed:
                self._idle += batch.alive

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
        with self._locked():
            self._closed = True
            self._idle.clear()
            for job in list(self._queue.jobs):
                self._queue.remove(job)
                self._end(job, CancelledError())

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds the mutex, and calls back afterwards, when others may have it again, for the jobs that ended."""
        with self._mutex:
            yield
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def check_patience(self, job: Job) -> None:
        """Gives a job up that its caller does not want any longer; the worker that has got it runs to its end.

        Raises:
            TimeoutError: The job is left to its worker: its deadline has passed.
            CancelledError: Alike, since the caller has lost interest.
        """
        reason = job.reason_to_give_up()
        if reason is not None and self.leave(job, reason):
            raise reason

    def leave(self, job: Job, reason: Exception) -> bool:
        """Ends a job that waits, and says whether a worker has got it instead, which nobody waits for any longer."""
        with self._locked():
            if job.state is JobState.WAITING:
                self._queue.remove(job)
                self._end(job, reason)
            # Meanwhile it may have been handed a worker, which somebody else has to lead.
            worker, job.worker = job.worker, None
            if worker is not None:
                self._hand_on(worker)
            if job.state is JobState.RUNNING:
                job.is_left = True  # should the worker die, nobody wants it run again
                job.on_end = _do_nothing  # until `when_untouched`
            return job.state is JobState.RUNNING

    def _lead(self, worker: Worker, own: Job) -> None:
        """Has the worker compute until the thread's own job has ended or nothing waits; then gives the worker on."""
        while True:
            if self._max_delay_s:
                self._expect_company(own)
            with self._locked():
                jobs = self._take_batch() if own.state is JobState.WAITING else []
                if not jobs:
                    own.worker = None
                    self._hand_on(worker)
                    return
                batch = Batch(jobs, self._shares(worker, jobs))
            try:
                batch.begin()
                while batch.busy:
                    batch.finish(batch.busy[0])
            except BaseException:
                own.worker = None
                self._rescue(jobs)
                self.leave(own, CancelledError())
                raise
            if batch.dead:
                own.worker = None
                self._rescue(jobs, free=batch.alive)
                return
            with self._locked():
                for other in batch.alive:
                    if other is not worker:
                        self._hand_on(other)
                self._end_all(batch)

    def _shares(self, worker: Worker, batch: list[Job]) -> dict[Worker, list[Part]]:
        """What each worker gets: a large job is split among those that would be idle; the mutex is held."""
        job = batch[0]
        is_fresh = len(batch) == 1 and job.attempts == 1
        if self._split and self._idle and is_fresh and job.nbytes >= _SPLIT_FROM_NBYTES:
            cuts = channel_cuts(job.spec, 1 + len(self._idle))
            crew = [worker, *(self._idle.pop() for _ in cuts[1:])]
            return {member: [(job, cut)] for member, cut in zip(crew, cuts, strict=True)}
        return {worker: [(job, range(job.spec.channels)) for job in batch]}

    def _expect_company(self, own: Job) -> None:
        """Waits until the first job has waited long enough, or there is a full batch."""
        with self._mutex:
            self._expecting.append(own)
        while own.state is JobState.WAITING and (rest_s := self.rest_of_delay()) > 0:
            own.sleep(rest_s)
        with self._mutex:
            self._expecting.remove(own)

    def waiting(self) -> tuple[int, int]:
        """How many jobs wait, and the size of their tensors in bytes."""
        with self._mutex:
            return len(self._queue), sum(job.nbytes for job in self._queue.jobs)

    def rest_of_delay(self) -> float:
        """For how long the first job may still wait for company, in seconds."""
        if not self._max_delay_s:
            return 0.0
        with self._mutex:
            if self._closed or not 0 < len(self._queue) < self._max_jobs:
                return 0.0
            return self._queue.jobs[0].arrival + self._max_delay_s - time.monotonic()

    def _hand_on(self, worker: Worker) -> None:
        """Has the first job that waits lead the worker: by its thread, or by the one that submitted it.

        The mutex is held.
        """
        for job in self._queue.jobs:
            if job.on_end is not None:
                break
            if job.worker is None:
                job.worker = worker
                job.wake()
                return
        if not self._closed:
            self._idle.append(worker)
            if len(self._queue):
                self.on_work()

    def _rescue(self, jobs: list[Job], free: Sequence[Worker] = ()) -> None:
        """Has wait again what a dead worker held, save for jobs that have cost too many workers.

        Args:
            jobs: What it held.
            free: The workers that computed with it, and that are alive.
        """
        with self._locked():
            self._idle += free
            for job in jobs:
                if job.is_left:
                    self._end(job, None)
                elif job.attempts >= MAX_ATTEMPTS:
                    self.quarantined += 1
                    self._end(job, ComputeError(f"{job.attempts} workers died while computing this request"))
                elif self._closed:
                    self._end(job, CancelledError())
                else:
                    job.state = JobState.WAITING
                    self.reruns += 1
                    self._queue.put_back(job)
            idle, self._idle = self._idle, []
            for worker in idle:
                self._hand_on(worker)

    def _take_batch(self) -> list[Job]:
        """The next jobs that somebody wants; none if there are no such; the mutex is held."""
        batch: list[Job] = []
        while not batch and len(self._queue):
            for job in self._queue.take():
                reason = job.reason_to_give_up()
                if reason is None:
                    batch.append(job)
                    job.attempts += 1
                    job.state = JobState.RUNNING
                else:
                    self._end(job, reason)
        if batch:
            self._count(batch)
        return batch

    def _count(self, batch: list[Job]) -> None:
        now, nbytes = time.monotonic(), 0
        for job in batch:
            job.started_at = now
            nbytes += job.nbytes
        self.batch_sizes[min(len(batch).bit_length(), _BATCH_SIZES) - 1] += 1
        self.batch_nbytes[min(max(nbytes.bit_length(), 1), _BATCH_NBYTES) - 1] += 1
        self.jobs_taken += len(batch)
        self.nbytes_taken += nbytes

    def _put(self, job: Job) -> None:
        """Has a new job wait; the mutex is held."""
        if self._closed:
            job.state = JobState.ENDED
            raise CancelledError
        self._queue.put(job)
        if self._expecting and len(self._queue) >= self._max_jobs:
            for leader in self._expecting:
                leader.wake()

    def _end_all(self, batch: Batch) -> None:
        now = time.monotonic()
        for i, job in enumerate(batch.jobs):
            job.ended_at = now
            self._end(job, ComputeError(batch.failures[i]) if i in batch.failures else None)

    def _end(self, job: Job, error: Exception | None) -> None:
        job.state = JobState.ENDED
        job.error = error
        if job.on_end is None:
            job.wake()
        else:
            self._callbacks.append(job.on_end)
            job.on_end = None  # what it refers to refers to the job: such circles would keep the collector busy


def _do_nothing() -> None:
    pass
