"""Leading workers: taking batches for them, and waiting for their answers.

There is no thread between the requests' threads and the workers. The thread of a request that finds a seat free, or is
handed one, leads its worker: takes a batch, waits for the worker, wakes the other threads of the batch, and once its
own request is done hands the seat on. A thread hop costs more than a small gradient.

Small requests have no thread each. One thread, a poller's, submits them all and leads workers whose seats are free,
without ever waiting for one.
"""

from __future__ import annotations

import functools
import logging
import time
from concurrent.futures import CancelledError

from bngrad_server.runtime.event_loop import EventLoop
from bngrad_server.scheduling.batch import Batch, Run, Worker
from bngrad_server.scheduling.batcher import Batcher
from bngrad_server.scheduling.job import Job

logger = logging.getLogger(__name__)

_LOOK_UP_S = 0.2
"""How often a waiting thread looks whether its client is still there."""


def run(batcher: Batcher, job: Job) -> None:
    """Has a worker compute a job, and returns when that is done.

    Raises:
        TimeoutError: Its deadline passed.
        CancelledError: The caller has lost interest, or the batcher is closed.
        ComputeError: No worker could compute it.
    """
    batcher.enter(job)
    while True:
        if job.worker is not None:
            _lead(batcher, job.worker, job)
        if job.has_ended:
            break
        rest_s = _LOOK_UP_S if job.deadline is None else min(_LOOK_UP_S, job.deadline - time.monotonic())
        job.sleep(rest_s)
        if job.worker is None and not job.has_ended:
            batcher.check_patience(job)
    if job.worker is not None:
        batcher.offer(job.worker)
    job.check()


def _lead(batcher: Batcher, worker: Worker, own: Job) -> None:
    """Has the worker compute until the thread's own job has ended or nothing waits; then gives the seat on."""
    while (batch := batcher.next_batch(worker, own)) is not None:
        try:
            batch.begin()
            while batch.busy:
                batch.finish(next(iter(batch.busy)))
        except BaseException:
            own.worker = None
            batcher.end_batch(batch)
            batcher.leave(own, CancelledError())
            raise
        if batch.dead:
            own.worker = None
            batcher.end_batch(batch)
            return
        batcher.end_batch(batch, kept=worker)


class Dispatcher:
    """Has workers compute what was submitted; all on the poller's thread.

    What came in with one round of the poller's events is one batch.
    """

    def __init__(self, event_loop: EventLoop, batcher: Batcher) -> None:
        """Leads from when the poller is started."""
        self._event_loop = event_loop
        self._batcher = batcher
        self._under_way = 0
        event_loop.after_events = self._begin
        event_loop.can_stop = lambda: not self._under_way
        batcher.on_work = lambda: event_loop.call_soon(_look)

    def _begin(self) -> float:
        """Has workers begin, and says when to look again."""
        for batch in self._batcher.begin_batches():
            self._under_way += 1
            for run in batch.busy:
                self._event_loop.add_priority_reader(run.fileno(), functools.partial(self._finish, batch, run))
            if not batch.busy:
                self._end(batch)
        delay_s = self._batcher.rest_of_delay()
        return time.monotonic() + delay_s if delay_s else float("inf")

    def _finish(self, batch: Batch, run: Run) -> None:
        self._event_loop.remove_priority_reader(run.fileno())
        try:
            batch.finish(run)
        except Exception:
            logger.exception("a worker failed as no worker should")
        if not batch.busy:
            self._end(batch)

    def _end(self, batch: Batch) -> None:
        self._under_way -= 1
        self._batcher.end_batch(batch)


def _look() -> None:
    """Nothing: the poller looks for work after whatever it does."""
