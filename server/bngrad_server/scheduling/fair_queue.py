"""The order in which jobs are computed: fair to every client, quick for small jobs, and none waits for ever.

Work is counted in bytes. Every client has a clock, which each job moves on by its work; the queue has one, which moves
on by the work that is taken, divided by the number of clients that wait, and no client's clock stays behind it: fair
queueing (Demers, Keshav and Shenker, SIGCOMM 1989). The rank of a job is where its client's clock stood when it came,
plus twice its work, less a head start for its priority, and never changes. The lowest rank goes first. Hence:

* Clients that wait get even shares of the workers, whatever they ask for.
* Among the jobs of a client, a small one overtakes a large one that came before it, until all that has overtaken it
  amounts to its own work.
* Every job has its turn after a bounded amount of work: the ranks of later ones grow beyond its own.
"""

from __future__ import annotations

import bisect
import itertools
import operator
from dataclasses import dataclass

from bngrad_server.scheduling.job import Job

_WORK_OF_ANY_JOB = 1 << 18
"""What a job costs beside its bytes, in bytes."""
_HEAD_START = 1 << 24
"""The work by which a step of priority lets a job overtake others."""
_COMPANY_SHARE = 8
"""A job that fills more than this part of a batch travels alone: its company would have to wait for it."""
_MAX_IDLE_CLIENTS = 1024

_rank = operator.attrgetter("rank")


@dataclass(slots=True)
class _Client:
    clock: int = 0
    waiting: int = 0


class FairQueue:
    """Jobs that wait, see the module; not for several threads at once."""

    def __init__(self, max_jobs: int, max_bytes: int) -> None:
        """Makes an empty queue.

        Args:
            max_jobs: The most jobs of a batch.
            max_bytes: A batch is closed once its jobs have so many bytes.
        """
        self._max_jobs = max_jobs
        self._max_bytes = max_bytes
        self._jobs: list[Job] = []  # by rank; those of the same rank as they came
        self._clients: dict[str, _Client] = {}
        self._clock = 0
        self._clients_waiting = 0

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def jobs(self) -> list[Job]:
        """All that wait, the next one first; not to be changed."""
        return self._jobs

    def put(self, job: Job) -> None:
        """Gives a new job its rank."""
        client = self._clients.get(job.client)
        if client is None:
            if len(self._clients) >= _MAX_IDLE_CLIENTS + len(self._jobs):
                self._forget_clients()
            client = self._clients[job.client] = _Client()
        work = job.nbytes + _WORK_OF_ANY_JOB
        start = max(client.clock, self._clock)
        client.clock = start + work
        job.rank = start + 2 * work - job.priority * _HEAD_START
        self.put_back(job)

    def put_back(self, job: Job) -> None:
        """Has a job that was taken wait again, where it was."""
        bisect.insort(self._jobs, job, key=_rank)
        client = self._clients.setdefault(job.client, _Client())
        client.waiting += 1
        self._clients_waiting += client.waiting == 1

    def remove(self, job: Job) -> None:
        """Takes a job out that nobody wants any longer."""
        self._jobs.remove(job)
        self._left(job)

    def take(self) -> list[Job]:
        """The next batch: the first job and, where that is small, small ones of the same kernel."""
        head = self._jobs[0]
        batch, nbytes = [head], head.nbytes
        if self._takes_company(head):
            for job in itertools.islice(self._jobs, 1, None):
                if len(batch) == self._max_jobs or nbytes >= self._max_bytes:
                    break
                if job.kernel_key == head.kernel_key and self._takes_company(job):
                    batch.append(job)
                    nbytes += job.nbytes
        if len(batch) == 1:
            del self._jobs[0]
        else:
            taken = set(batch)
            self._jobs = [job for job in self._jobs if job not in taken]
        self._clock += (nbytes + len(batch) * _WORK_OF_ANY_JOB) // self._clients_waiting
        for job in batch:
            self._left(job)
        return batch

    def _takes_company(self, job: Job) -> bool:
        """Whether others may be in its batch: it is small, and no worker has died of it, so it takes none along."""
        return job.attempts == 0 and job.nbytes * _COMPANY_SHARE <= self._max_bytes

    def _left(self, job: Job) -> None:
        client = self._clients[job.client]
        client.waiting -= 1
        self._clients_waiting -= client.waiting == 0

    def _forget_clients(self) -> None:
        """Forgets clients that have nothing to wait for: coming back, they are treated as new."""
        self._clients = {name: client for name, client in self._clients.items() if client.waiting}
