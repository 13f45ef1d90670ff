"""The free slots of workers, and which of them may be taken.

A worker computes as many batches at once as it has slots, so that the copies of one overlap with the kernels of
another. Of brief batches little overlaps, since it is the worker's Python that takes time; fewer and larger ones take
less of it. So while a worker computes a brief batch, it begins no other, and small jobs wait to share the next one.

When a worker dies, all its batches are lost, and any of their jobs may be the cause. These suspects must not take other
jobs along, nor be blamed for other jobs, when they run again. So until the last of them has ended, no worker computes
more than one batch at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from bngrad_kernels.problem import channel_cuts
from bngrad_server.scheduling.batch import Batch
from bngrad_server.scheduling.job import Job, Part, Worker

_SPLIT_FROM_NBYTES = 1 << 21
"""Smaller jobs are not worth two workers."""


class FreeSlots:
    """Free slots, each represented by its worker; guarded by the batcher's mutex.

    Attributes:
        suspects: The jobs that have cost a worker, until they have ended.
    """

    def __init__(self, brief_nbytes: int, *, split: bool) -> None:
        """Has no slot yet.

        Args:
            brief_nbytes: A job, or a batch, of less is brief.
            split: Whether a large job is split among workers that would be idle.
        """
        self.suspects: set[Job] = set()
        self._brief_nbytes = brief_nbytes
        self._split = split
        self._workers: list[Worker] = []
        self._brief: Counter[Worker] = Counter()  # how many brief batches each computes

    def __len__(self) -> int:
        return len(self._workers)

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers)

    def add(self, workers: Iterable[Worker]) -> None:
        """Adds slots that have become free, one for each worker."""
        self._workers += workers

    def forget(self, dead: Iterable[Worker]) -> None:
        """Removes all slots of workers that have died."""
        gone = set(dead)
        self._workers = [worker for worker in self._workers if worker not in gone]

    def take_all(self) -> list[Worker]:
        """Takes all slots, to be dealt out anew."""
        workers, self._workers = self._workers, []
        return workers

    def take(self, job: Job) -> Worker | None:
        """Takes a slot, if one may be taken: of a GPU with a copy of the job's input, or else of an idle worker."""
        worker = self._take_near(job) or self._take_idle()
        if worker is None and not self.suspects:
            worker = next((each for each in reversed(self._workers) if self.is_worth(each, job)), None)
            if worker is not None:
                self._workers.remove(worker)
        return worker

    def is_worth(self, worker: Worker, job: Job) -> bool:
        """Whether a slot is worth taking for a job now, rather than when the worker's brief batch has ended."""
        return not self._brief[worker] or job.nbytes >= self._brief_nbytes

    def may_use(self, worker: Worker) -> bool:
        """Whether a batch may begin on a slot that was taken."""
        return not self.suspects or self._workers.count(worker) == worker.slots - 1

    def batch(self, worker: Worker, jobs: list[Job]) -> Batch:
        """Makes a batch for a slot that was taken; splits a large job among idle workers, whose slots this takes."""
        batch = Batch(jobs, self._shares(worker, jobs))
        if self._is_brief(batch):
            self._brief.update(batch.workers)
        return batch

    def end(self, batch: Batch) -> bool:
        """Notes that a batch has ended; returns whether it was brief, so that jobs may wait for free slots."""
        if not self._is_brief(batch):
            return False
        self._brief.subtract(batch.workers)
        self._brief += Counter()  # forgets those that compute none
        return True

    def _shares(self, worker: Worker, jobs: list[Job]) -> dict[Worker, list[Part]]:
        job = jobs[0]
        is_fresh = len(jobs) == 1 and job.attempts == 1
        if self._split and self._workers and is_fresh and job.nbytes >= _SPLIT_FROM_NBYTES:
            others = list(iter(self._take_idle, None))
            cuts = channel_cuts(job.spec, 1 + len(others))
            self._workers += reversed(others[len(cuts) - 1 :])
            return {member: [(job, cut)] for member, cut in zip([worker, *others], cuts, strict=False)}
        return {worker: [(job, range(job.spec.channels)) for job in jobs]}

    def _take_near(self, job: Job) -> Worker | None:
        """Takes a slot of a worker that has a copy of an input that was sent ahead."""
        if len(self._workers) > 1 and not self.suspects:
            for number in (place.ahead for place in job.task.places if place.ahead):
                for i, worker in enumerate(self._workers):
                    if worker.has_copy(number):
                        return self._workers.pop(i)
        return None

    def _take_idle(self) -> Worker | None:
        """Takes a slot of a worker all of whose slots are free."""
        for i in reversed(range(len(self._workers))):
            worker = self._workers[i]
            if self._workers.count(worker) == worker.slots:
                del self._workers[i]
                return worker
        return None

    def _is_brief(self, batch: Batch) -> bool:
        return sum(job.nbytes for job in batch.jobs) < self._brief_nbytes
