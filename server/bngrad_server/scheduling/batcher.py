"""Brings waiting jobs and free slots of workers together.

A worker has one slot for each batch that it computes at a time. The threads that take slots and dispatch batches to
them are in `bngrad_server.scheduling.dispatch`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError

from bngrad_server.errors import ComputeError
from bngrad_server.scheduling.batch import Batch, BatchCounts
from bngrad_server.scheduling.fair_queue import FairQueue
from bngrad_server.scheduling.free_slots import FreeSlots
from bngrad_server.scheduling.job import Job, JobState, Worker

logger = logging.getLogger(__name__)

_BRIEF_FRACTION = 4
"""A batch of less than one part in this many of the largest is brief."""
MAX_ATTEMPTS = 2
"""A job is given up when this many workers have died of it."""


class Batcher:
    """Holds the jobs that wait and the slots that are free, and changes the state of every job.

    Attributes:
        counts: What happened so far.
    """

    def __init__(self, max_jobs: int, max_bytes: int, max_delay_s: float = 0.0, *, split: bool = True) -> None:
        """Has no worker yet.

        A job may wait for the batch delay, ``max_delay_s``, for its batch to fill while a slot is free. The other
        arguments are those of `FairQueue` and `FreeSlots`.
        """
        self.counts = BatchCounts()
        self._max_jobs = max_jobs
        self._max_delay_s = max_delay_s
        self._on_work = _do_nothing
        self._mutex = threading.Lock()  # guards all that follows, and the state of every job
        self._locked = _Locked(self._mutex)
        self._queue = FairQueue(max_jobs, max_bytes)
        self._free = FreeSlots(max_bytes // _BRIEF_FRACTION, split=split)
        self._delayed: list[Job] = []  # whose threads hold slots while their batches fill
        self._closed = False

    def notify(self, on_work: Callable[[], None]) -> None:
        """Calls ``on_work``, which must not call the batcher, when a slot is free and a submitted job comes next."""
        self._on_work = on_work

    def enter(self, job: Job) -> None:
        """Puts a job into the queue that has a thread, and gives it a slot, `Job.worker`, if one is free.

        Raises:
            CancelledError: The batcher is closed.
        """
        with self._mutex:
            self._put(job)
            job.worker = self._free.take(job)

    def submit(self, job: Job) -> None:
        """Puts a job into the queue that has no thread; `Job.on_end` is called when it has ended, unless it was left.

        Raises:
            CancelledError: The batcher is closed.
        """
        with self._mutex:
            self._put(job)

    def begin_batches(self) -> tuple[list[Batch], float]:
        """Begins batches on free slots; each goes to `end_batch` once none of its runs is busy.

        Returns:
            The batches; and when one will have waited long enough to fill, on the monotonic clock, or infinity.
        """
        if not self._free or not len(self._queue):
            return [], math.inf
        if (rest_s := self._rest_of_delay()) > 0:
            return [], time.monotonic() + rest_s
        batches, begun = [], []
        with self._locked:
            while len(self._queue) and (worker := self._free.take(self._queue.jobs[0])) is not None:
                jobs = self._take_batch()
                if not jobs:
                    self._free.add([worker])
                    break
                batches.append(self._free.batch(worker, jobs))
        for batch in batches:
            try:
                batch.begin()
                begun.append(batch)
            except Exception:
                logger.exception("a batch could not be begun")
                self.end_batch(batch)
        return begun, math.inf

    def next_batch(self, leader: Job) -> Batch | None:
        """Takes the next batch for the leader's slot; if there is none, or the leader has ended, hands the slot on."""
        if self._max_delay_s:
            self._await_delay(leader)
        with self._locked:
            worker = leader.worker
            assert worker is not None
            if leader.state is JobState.WAITING and self._free.may_use(worker) and (jobs := self._take_batch()):
                return self._free.batch(worker, jobs)
            leader.worker = None
            self._hand_on(worker)
            return None

    def end_batch(self, batch: Batch, leader: Job | None = None) -> None:
        """Ends the jobs of a batch, or has them wait again if a worker died; frees the slots.

        Args:
            batch: The batch.
            leader: The job whose thread keeps its slot for the next batch; None where the event loop takes free slots.
                After a death, no slot is kept.
        """
        if batch.dead:
            self._rescue(batch, leader)
            return
        with self._locked:
            is_brief = self._free.end(batch)
            self._end_all(batch)
            if leader is None:
                self._free.add(batch.alive)
                return
            for worker in batch.alive:
                if worker is not leader.worker:
                    self._hand_on(worker)
            if is_brief and len(self._queue):
                self._hand_all_on()

    def count_single(self, nbytes: int, busy_s: float) -> None:
        """Counts a request that was computed by itself without a worker, and how long that took."""
        with self._mutex:
            self.counts.add(1, nbytes)
            self.counts.ended += 1
            self.counts.busy_s += busy_s
            self.counts.front_busy_s += busy_s

    def offer(self, worker: Worker) -> None:
        """Puts a free slot of a worker to use."""
        with self._mutex:
            self._hand_on(worker)

    def withdraw(self, worker: Worker) -> None:
        """Takes a worker that has died out of use."""
        with self._mutex:
            self._free.forget([worker])

    def when_untouched(self, job: Job, callback: Callable[[], None]) -> None:
        """Calls back once no worker can touch the job's memory: now, or when its worker is done with it."""
        with self._mutex:
            if job.state is JobState.RUNNING:
                job.on_end = callback
                return
        callback()

    def close(self) -> None:
        """Ends every job that waits, and takes no more."""
        with self._locked:
            self._closed = True
            for job in list(self._queue.jobs):
                self._queue.remove(job)
                self._end(job, CancelledError())

    def expire(self, job: Job) -> None:
        """Gives a job up whose request waits no longer; if a worker computes it, the worker runs to its end.

        Raises:
            TimeoutError: The job was left to its worker: its deadline has passed.
            CancelledError: The job was left to its worker: the client has cancelled the request.
        """
        reason = job.reason_to_give_up()
        try:
            if reason is not None and self.leave(job, reason):
                raise reason
        finally:
            del reason  # its traceback has this frame: a reference cycle

    def leave(self, job: Job, reason: Exception) -> bool:
        """Ends a job that waits; returns whether a worker computes it instead, and no request waits for it."""
        with self._locked:
            if job.state is JobState.WAITING:
                self._queue.remove(job)
                self._end(job, reason)
            worker, job.worker = job.worker, None
            if worker is not None:  # a slot that was handed to it meanwhile
                self._hand_on(worker)
            if job.state is JobState.RUNNING:
                job.is_left = True  # it is not run again if the worker dies
                job.on_end = _do_nothing  # until `when_untouched`
            return job.state is JobState.RUNNING

    def _await_delay(self, leader: Job) -> None:
        """Waits until the first job has waited for the batch delay, or there is a full batch."""
        with self._mutex:
            self._delayed.append(leader)
        while leader.state is JobState.WAITING and (rest_s := self._rest_of_delay()) > 0:
            leader.sleep(rest_s)
        with self._mutex:
            self._delayed.remove(leader)

    def waiting(self) -> tuple[int, int]:
        """How many jobs wait, and the size of their tensors in bytes."""
        with self._mutex:
            return len(self._queue), sum(job.nbytes for job in self._queue.jobs)

    def _rest_of_delay(self) -> float:
        """For how long the first job may still wait for its batch to fill, in seconds."""
        if not self._max_delay_s:
            return 0.0
        with self._mutex:
            if not 0 < len(self._queue) < self._max_jobs:
                return 0.0
            return self._queue.jobs[0].arrival + self._max_delay_s - time.monotonic()

    def _hand_on(self, worker: Worker) -> None:
        """Promotes the first waiting job without a slot, unless the event loop comes first; the mutex is held."""
        if self._free.may_use(worker):
            for job in self._queue.jobs:
                if job.on_end is not None:
                    break
                if job.worker is None:
                    if not self._free.is_worth(worker, job):
                        break
                    job.worker = worker
                    job.wake()
                    return
        self._free.add([worker])
        if len(self._queue):
            self._on_work()

    def _hand_all_on(self) -> None:
        """Deals the free slots out anew, since other jobs may take them now; the mutex is held."""
        for worker in self._free.take_all():
            self._hand_on(worker)

    def _rescue(self, batch: Batch, leader: Job | None) -> None:
        """Has the jobs of a batch whose worker died wait again, except those that have cost too many workers."""
        with self._locked:
            if leader is not None:
                leader.worker = None
            self._free.end(batch)
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
        """Takes the next jobs whose requests still wait; none if there are none; the mutex is held."""
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
            raise CancelledError
        self._queue.put(job)
        if self._delayed and len(self._queue) >= self._max_jobs:
            for leader in self._delayed:
                leader.wake()

    def _end_all(self, batch: Batch) -> None:
        now = time.monotonic()
        self.counts.ended += len(batch.jobs)
        self.counts.busy_s += (now - batch.jobs[0].started_at) * len(batch.alive)
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
            self._locked.callbacks.append(job.on_end)
            job.on_end = None  # breaks a reference cycle, which would keep the garbage collector busy


class _Locked:
    """Holds a mutex during a block; after releasing it, calls back for the jobs that ended.

    Attributes:
        callbacks: What to call.
    """

    def __init__(self, mutex: threading.Lock) -> None:
        self.callbacks: list[Callable[[], None]] = []
        self._mutex = mutex

    def __enter__(self) -> None:
        self._mutex.acquire()

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        callbacks, self.callbacks = self.callbacks, []
        self._mutex.release()
        for callback in callbacks:
            callback()


def _do_nothing() -> None:
    pass
