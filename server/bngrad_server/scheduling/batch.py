"""Workers, and how several of them compute together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeAlias

from bngrad_server.errors import WorkerDiedError
from bngrad_server.scheduling.job import Job

Part: TypeAlias = tuple[Job, range]
"""A job, and which of its channels to compute."""


class Run(Protocol):
    """A batch that a worker computes, led by one thread at a time."""

    def fileno(self) -> int:
        """The file descriptor that is readable once `finish` need not wait."""

    def finish(self) -> list[str | None] | None:
        """Waits until all is computed, and says for each part why it failed, if any did.

        Raises:
            WorkerDiedError: The process ended.
        """


class Worker(Protocol):
    """What computes batches."""

    @property
    def slots(self) -> int:
        """How many batches it computes at once."""

    def begin(self, parts: Sequence[Part]) -> Run:
        """Begins to compute parts of jobs of one kernel key, while fewer batches than it has seats are begun.

        Raises:
            WorkerDiedError: The process ended.
        """

    def kill(self) -> None:
        """Ends the process at once."""


class Batch:
    """Jobs that one worker computes, or several of them together.

    Attributes:
        jobs: The jobs.
        busy: What is not finished yet, and whose it is.
        failures: Why jobs failed, by their place in the batch.
        dead: The workers that died meanwhile.
        is_suspect: Whether one of them may have died of it.
    """

    def __init__(self, jobs: list[Job], shares: dict[Worker, list[Part]]) -> None:
        self.jobs = jobs
        self.busy: dict[Run, Worker] = {}
        self.failures: dict[int, str] = {}
        self.dead: list[Worker] = []
        self.is_suspect = False
        self._shares = shares

    @property
    def alive(self) -> list[Worker]:
        """The workers that have not died."""
        return [worker for worker in self._shares if worker not in self.dead]

    def begin(self) -> None:
        """Has every worker begin; see `finish`."""
        with self._killing_on_failure():
            for worker, parts in self._shares.items():
                with self._noting_death(worker):
                    self.busy[worker.begin(parts)] = worker

    def finish(self, run: Run) -> None:
        """Waits for a worker. Once nothing is busy, nothing touches a job any longer.

        Whatever it raises, as no worker should, every worker is killed then.
        """
        worker = self.busy.pop(run)
        with self._killing_on_failure(), self._noting_death(worker):
            answers = run.finish()
            self.failures.update((i, failure) for i, failure in enumerate(answers or ()) if failure is not None)

    @contextmanager
    def _killing_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.dead, self.is_suspect = list(self._shares), True
            for worker in self._shares:
                worker.kill()  # nobody may lead it any more: its keeper starts another
            raise

    @contextmanager
    def _noting_death(self, worker: Worker) -> Iterator[None]:
        try:
            yield
        except WorkerDiedError as death:
            self.dead.append(worker)
            self.is_suspect |= death.saw_batch
            worker.kill()  # it may have hung up without having died
