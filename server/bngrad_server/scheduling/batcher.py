"""Between requests and workers: whoever is free takes the next batch.

What is free is a seat, of which a worker has one for each batch that it computes at a time. Who takes seats and leads
their workers is in `bngrad_server.scheduling.dispatch`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager

from bngrad_server.errors import ComputeError
from bngrad_server.scheduling.batch import Batch, Worker
from bngrad_server.scheduling.batch_counts import BatchCounts
from bngrad_server.scheduling.fair_queue import FairQueue
from bngrad_server.scheduling.job import Job, JobState
from bngrad_server.scheduling.slots import FreeSlots

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 2
"""A job is given up when this many workers have died of it."""


class Batcher:
    """Brings jobs and workers together.

    Attributes:
        counts: What happened so far.
        on_work: Is called, from any thread, where a seat is free and a job is next that was submitted. It must not
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
        self.counts = BatchCounts()
        self.on_work = _do_nothing
        self._max_jobs = max_jobs
        self._max_delay_s = max_delay_s
        self._mutex = threading.Lock()  # guards all that follows, and the state of every job
        self._queue = FairQueue(max_jobs, max_bytes)
        self._free = FreeSlots(split=split)
        self._expecting: list[Job] = []  # whose threads have a worker, and wait for company
        self._callbacks: list[Callable[[], None]] = []
        self._closed = False

    def enter(self, job: Job) -> None:
        """Has a job wait whose thread takes a seat for it, `Job.worker`, if one is free.

        Raises:
            CancelledError: The batcher is closed.
        """
        with self._mutex:
            self._put(job)
            job.worker = self._free.take()

    def submit(self, job: Job) -> None:
        """Has a job wait that has no thread; `Job.on_end` is called when it has ended, unless it is left before.

        Raises:
            CancelledError: The batcher is closed.
        """
        with self._mutex:
            self._put(job)

    def begin_batches(self) -> list[Batch]:
        """Has what waits begun on free seats; each batch goes to `end_batch`, once nothing is busy with it."""
        if not self._free or not len(self._queue) or self.rest_of_delay() > 0:
            return []
        batches, begun = [], []
        with self._locked():
            while len(self._queue) and (worker := self._free.take()) is not None:
                jobs = self._take_batch()
                if not jobs:
                    self._free.add([worker])
                    break
                batches.append(Batch(jobs, self._free.shares(worker, jobs)))
        for batch in batches:
            try:
                batch.begin()
                begun.append(batch)
            except Exception:
                logger.exception("a batch could not be begun")
                self.end_batch(batch)
        return begun

    def next_batch(self, worker: Worker, own: Job) -> Batch | None:
        """The next batch for a seat that a job's thread has; hands it on where there is none, or the job has ended.

        Args:
            worker: Whose seat it is.
            own: The job.
        """
        if self._max_delay_s:
            self._expect_company(own)
        with self._locked():
            if own.state is JobState.WAITING and self._free.may_use(worker) and (jobs := self._take_batch()):
                return Batch(jobs, self._free.shares(worker, jobs))
            own.worker = None
            self._hand_on(worker)
            return None

    def end_batch(self, batch: Batch, kept: Worker | None = None) -> None:
        """Ends the jobs of a batch, or has them wait again if a worker died; frees the seats.

        Args:
            batch: The batch.
            kept: The worker whose seat a thread keeps for its next batch; None where the poller takes what is free.
                After a death, nobody keeps any.
        """
        if batch.dead:
            self._rescue(batch)
            return
        with self._locked():
            self._end_all(batch)
            if kept is None:
                self._free.add([] if self._closed else batch.alive)
            else:
                for other in batch.alive:
                    if other is not kept:
                        self._hand_on(other)

    def offer(self, worker: Worker) -> None:
        """Puts a seat to use that is free."""
        with self._mutex:
            self._hand_on(worker)

    def withdraw(self, worker: Worker) -> None:
        """Takes a worker out of use that has died."""
        with self._mutex:
            self._free.forget([worker])

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
            self._free.take_all()
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
        """Has the first job that waits take a seat: its thread, or the one that submitted it.

        The mutex is held.
        """
        if self._free.may_use(worker):
            for job in self._queue.jobs:
                if job.on_end is not None:
                    break
                if job.worker is None:
                    job.worker = worker
                    job.wake()
                    return
        if not self._closed:
            self._free.add([worker])
            if len(self._queue):
                self.on_work()

    def _hand_all_on(self) -> None:
        """Deals the free seats out once more, since it has changed who may take which; the mutex is held."""
        for worker in self._free.take_all():
            self._hand_on(worker)

    def _rescue(self, batch: Batch) -> None:
        """Has wait again what a dead worker held, save for jobs that have cost too many workers."""
        with self._locked():
            self._free.forget(batch.dead)
            self._free.add(batch.alive)
            for job in batch.jobs:
                if not batch.is_suspect:
                    job.attempts -= 1
                if job.is_left:
                    self._end(job, None)
                elif job.attempts >= MAX_ATTEMPTS:
                    self.counts.quarantined += 1
                    self._end(job, ComputeError(f"{job.attempts} workers died while computing this request"))
                elif self._closed:
                    self._end(job, CancelledError())
                else:
                    job.state = JobState.WAITING
                    self.counts.reruns += 1
                    if batch.is_suspect:
                        self._free.suspects.add(job)
                    self._queue.put_back(job)
            self._hand_all_on()

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
            now, nbytes = time.monotonic(), 0
            for job in batch:
                job.started_at = now
                nbytes += job.nbytes
            self.counts.add(len(batch), nbytes)
        return batch

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
        if job in self._free.suspects:
            self._free.suspects.remove(job)
            self._hand_all_on()
        if job.on_end is None:
            job.wake()
        else:
            self._callbacks.append(job.on_end)
            job.on_end = None  # what it refers to refers to the job: such circles would keep the collector busy


def _do_nothing() -> None:
    pass
