"""The order in which jobs are computed: fair to every client, quick for small jobs, and none waits for ever.

This is fair queueing (Demers, Keshav and Shenker, SIGCOMM 1989), with work counted in bytes. Every client has a clock,
which each of its jobs advances by the job's work. The queue has a clock, which advances by the work that is taken,
divided by the number of clients that wait; no client's clock stays behind it. The rank of a job is the time on its
client's clock when it came, plus twice its work, less a head start for its priority; it never changes. The lowest rank
goes first. Hence:

* Clients that wait get even shares of the workers, whatever they request.
* Among the jobs of a client, a small one overtakes a large one that came before it, until all that has overtaken it
  amounts to its own work.
* Every job has its turn after a bounded amount of work: later jobs get ever higher ranks.
"""

from __future__ import annotations

import bisect
import itertools
import operator
from dataclasses import dataclass

from bngrad_server.scheduling.job import WORK_OF_ANY_REQUEST, Job

_HEAD_START = 1 << 24
"""The work, in bytes, by which a step of priority lets a job overtake others."""
_SHARED_BATCH_FRACTION = 8
"""A job that fills more than one part in this many of a batch is computed alone: the others would wait for it."""
_MAX_IDLE_CLIENTS = 1024

_rank = operator.attrgetter("rank")


@dataclass(slots=True)
class _ClientClock:
    """The clock of a client, and how many of its jobs wait."""

    clock: int = 0
    waiting: int = 0


class FairQueue:
    """The jobs that wait, by rank; not for several threads at once."""

    def __init__(self, max_jobs: int, max_bytes: int) -> None:
        """Closes a batch once it has this many jobs, or its jobs this many bytes."""
        self._max_jobs = max_jobs
        self._max_bytes = max_bytes
        self._jobs: list[Job] = []  # by rank; those of the same rank as they came
        self._clients: dict[str, _ClientClock] = {}
        self._clock = 0
        self._clients_waiting = 0

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def jobs(self) -> list[Job]:
        """All that wait, the next one first; the caller must not change the list."""
        return self._jobs

    def put(self, job: Job) -> None:
        """Adds a new job, and gives it its rank."""
        client = self._clients.get(job.client)
        if client is None:
            if len(self._clients) >= _MAX_IDLE_CLIENTS + len(self._jobs):
                self._forget_clients()
            client = self._clients[job.client] = _ClientClock()
        work = job.nbytes + WORK_OF_ANY_REQUEST
        start = max(client.clock, self._clock)
        client.clock = start + work
        job.rank = start + 2 * work - job.priority * _HEAD_START
        self.put_back(job)

    def put_back(self, job: Job) -> None:
        """Adds a job again that was taken, with the rank that it had."""
        bisect.insort(self._jobs, job, key=_rank)
        client = self._clients.setdefault(job.client, _ClientClock())
        client.waiting += 1
        self._clients_waiting += client.waiting == 1

    def remove(self, job: Job) -> None:
        """Removes a job whose request has ended."""
        self._jobs.remove(job)
        self._left(job)

    def take(self) -> list[Job]:
        """Takes the next batch: the first job and, where that is small, small ones of the same kernel."""
        head = self._jobs[0]
        batch, nbytes = [head], head.nbytes
        if self._may_share_batch(head):
            for job in itertools.islice(self._jobs, 1, None):
                if len(batch) == self._max_jobs or nbytes >= self._max_bytes:
                    break
                if job.kernel_key == head.kernel_key and self._may_share_batch(job):
                    batch.append(job)
                    nbytes += job.nbytes
        if len(batch) == 1:
            del self._jobs[0]
        else:
            taken = set(batch)
            self._jobs = [job for job in self._jobs if job not in taken]
        self._clock += (nbytes + len(batch) * WORK_OF_ANY_REQUEST) // self._clients_waiting
        for job in batch:
            self._left(job)
        return batch

    def _may_share_batch(self, job: Job) -> bool:
        """Whether a batch may hold other jobs too: this one is small, and no worker has died of it."""
        return job.attempts == 0 and job.nbytes * _SHARED_BATCH_FRACTION <= self._max_bytes

    def _left(self, job: Job) -> None:
        client = self._clients[job.client]
        client.waiting -= 1
        self._clients_waiting -= client.waiting == 0

    def _forget_clients(self) -> None:
        """Forgets clients without waiting jobs; if they return, they are treated as new."""
        self._clients = {name: client for name, client in self._clients.items() if client.waiting}
