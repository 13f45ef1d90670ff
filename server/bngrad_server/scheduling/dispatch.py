"""Leader/followers: the request thread that gets a free slot dispatches the batch, then promotes the next waiter.

There is no thread between the requests' threads and the workers, since a thread hop costs more than a small gradient.
The request thread that holds a slot takes a batch, waits for the worker, and wakes the other threads of the batch. Once
its own request has ended, it hands the slot on.

Small requests have no thread each. The thread of one event loop submits them all, and dispatches batches to slots that
are free, without ever waiting for a worker.
"""

from __future__ import annotations

import functools
import logging
import time
from concurrent.futures import CancelledError

from bngrad_server.runtime.event_loop import EventLoop
from bngrad_server.scheduling.batch import Batch
from bngrad_server.scheduling.batcher import Batcher
from bngrad_server.scheduling.job import Job, Run

logger = logging.getLogger(__name__)

_CHECK_INTERVAL_S = 0.2
"""How often a waiting thread checks whether its client is still there."""


def run(batcher: Batcher, job: Job) -> None:
    """Has a worker compute a job, and returns when it has ended; `Job.check` then tells how.

    Raises:
        TimeoutError: Its deadline passed while a worker computes it.
        CancelledError: The client cancelled the request while a worker computes it, or the batcher is closed.
    """
    batcher.enter(job)
    while job.worker is not None or not job.has_ended:
        if job.worker is not None:
            _lead(batcher, job)
        else:
            rest_s = _CHECK_INTERVAL_S
            if job.deadline is not None:
                rest_s = min(rest_s, job.deadline - time.monotonic())
            job.sleep(rest_s)
            if job.worker is None and not job.has_ended:
                batcher.expire(job)


def _lead(batcher: Batcher, leader: Job) -> None:
    """Dispatches a batch to the leader's slot and waits for it; where there is none, the slot is handed on."""
    batch = batcher.next_batch(leader)
    if batch is None:
        return
    try:
        batch.begin()
        while batch.busy:
            batch.finish(next(iter(batch.busy)))
    except BaseException:
        batcher.end_batch(batch, leader)
        batcher.leave(leader, CancelledError())
        raise
    batcher.end_batch(batch, leader)


class Dispatcher:
    """Dispatches the jobs that were submitted, on the thread of an event loop.

    The jobs that are submitted in one round of the loop's events are one batch.
    """

    def __init__(self, event_loop: EventLoop, batcher: Batcher) -> None:
        self._event_loop = event_loop
        self._batcher = batcher
        self._batches = 0  # that workers compute
        event_loop.after_events = self._begin_batches
        event_loop.can_stop = lambda: not self._batches
        batcher.notify(lambda: event_loop.call_soon(lambda: None))  # it looks for work after every action

    def _begin_batches(self) -> float:
        """Has workers begin batches; returns when to look again, on the monotonic clock."""
        batches, look_at = self._batcher.begin_batches()
        for batch in batches:
            self._batches += 1
            runs = list(batch.busy)
            for run in runs:
                self._expect(batch, run)
            if not runs:
                self._end(batch)
        return look_at

    def _expect(self, batch: Batch, run: Run) -> None:
        try:
            self._event_loop.add_priority_reader(run.fileno(), functools.partial(self._finish, batch, run))
        except OSError:  # no memory, or too many descriptors are watched
            self._finish(batch, run)  # waits for the worker

    def _finish(self, batch: Batch, run: Run) -> None:
        self._event_loop.remove_priority_reader(run.fileno())
        try:
            batch.finish(run)
        except Exception:
            logger.exception("unexpected error from a worker")
        if not batch.busy:
            self._end(batch)

    def _end(self, batch: Batch) -> None:
        self._batches -= 1
        self._batcher.end_batch(batch)
