"""The free slots of workers, and which of them may be taken.

A worker computes as many batches at once as it has slots. When it dies, all of them are lost, and any of their jobs may
be the cause. These suspects must not take other jobs along, nor be blamed for other jobs, when they run again. So until
the last of them has ended, no worker computes more than one batch at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from bngrad_kernels.problem import channel_cuts
from bngrad_server.scheduling.job import Job, Part, Worker

_SPLIT_FROM_NBYTES = 1 << 21
"""Smaller jobs are not worth two workers."""


class FreeSlots:
    """Free slots, each represented by its worker; guarded by the batcher's mutex.

    Attributes:
        suspects: The jobs that have cost a worker, until they have ended.
    """

    def __init__(self, *, split: bool) -> None:
        """Has no slot yet; ``split`` says whether a large job is split among workers that would be idle."""
        self.suspects: set[Job] = set()
        self._split = split
        self._workers: list[Worker] = []

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
        if worker is None and self._workers and not self.suspects:
            worker = self._workers.pop()
        return worker

    def may_use(self, worker: Worker) -> bool:
        """Whether a batch may begin on a slot that was taken."""
        return not self.suspects or self._workers.count(worker) == worker.slots - 1

    def shares(self, worker: Worker, jobs: list[Job]) -> dict[Worker, list[Part]]:
        """Divides a batch for a slot that was taken; splits a large job among idle workers, whose slots this takes."""
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
