"""Leading workers without a thread for each: whose answer is there is told by the poller."""

from __future__ import annotations

import functools
import logging
import time

from bngrad_server.batching import Batcher
from bngrad_server.crew import Batch, Worker
from bngrad_server.poller import Poller

logger = logging.getLogger(__name__)


class Leader:
    """Has idle workers compute what was submitted; all on the poller's thread.

    What came in with one round of the poller's events is one batch.
    """

    def __init__(self, poller: Poller, batcher: Batcher) -> None:
        """Leads from when the poller is started."""
        self._poller = poller
        self._batcher = batcher
        self._under_way = 0
        poller.after_events = self._begin
        poller.may_end = lambda: not self._under_way
        batcher.on_work = lambda: poller.soon(_look)

    def _begin(self) -> float:
        """Has workers begin, and says when to look again."""
        for batch in self._batcher.begin_batches():
            self._under_way += 1
            for worker in batch.busy:
                self._poller.watch_first(worker.fileno(), functools.partial(self._finish, batch, worker))
            if not batch.busy:
                self._end(batch)
        delay_s = self._batcher.rest_of_delay()
        return time.monotonic() + delay_s if delay_s else float("inf")

    def _finish(self, batch: Batch, worker: Worker) -> None:
        self._poller.forget_first(worker.fileno())
        try:
            batch.finish(worker)
        except Exception:
            logger.exception("a worker failed as no worker should")
        if not batch.busy:
            self._end(batch)

    def _end(self, batch: Batch) -> None:
        self._under_way -= 1
        self._batcher.end_batch(batch)


def _look() -> None:
    """Nothing: the poller looks for work after whatever it does."""
