"""A batch of jobs, which one worker computes or several together, and the counters of batches."""

from __future__ import annotations

from bngrad_server.errors import WorkerDiedError
from bngrad_server.scheduling.job import Job, Part, Run, Worker

_SIZES = 16
_NBYTES = 41


class Batch:
    """Jobs that one worker computes, or several of them together.

    Attributes:
        jobs: The jobs.
        busy: The runs that are not finished yet, with their workers.
        failures: Why jobs failed, by their index in the batch.
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
    def workers(self) -> list[Worker]:
        """Those that compute it."""
        return list(self._shares)

    @property
    def alive(self) -> list[Worker]:
        """The workers that have not died."""
        return [worker for worker in self._shares if worker not in self.dead]

    def begin(self) -> None:
        """Has every worker begin; see `finish`."""
        try:
            for worker, parts in self._shares.items():
                try:
                    self.busy[worker.begin(parts)] = worker
                except WorkerDiedError as death:
                    self._note_death(worker, death)
        except BaseException:
            self._kill_all()
            raise

    def finish(self, run: Run) -> None:
        """Waits for a worker. Once no run is busy, no worker touches the jobs' memory.

        An unexpected exception kills every worker of the batch.
        """
        worker = self.busy.pop(run)
        try:
            answers = run.finish()
            self.failures.update((i, failure) for i, failure in enumerate(answers or ()) if failure is not None)
        except WorkerDiedError as death:
            self._note_death(worker, death)
        except BaseException:
            self._kill_all()
            raise

    def _kill_all(self) -> None:
        self.dead, self.is_suspect = list(self._shares), True
        for worker in self._shares:
            worker.kill()  # its state is unknown: its supervisor starts another one

    def _note_death(self, worker: Worker, death: WorkerDiedError) -> None:
        self.dead.append(worker)
        self.is_suspect |= death.saw_batch
        worker.kill()  # it may have closed its socket without having died


class BatchCounts:
    """Counters, from the start of the server; guarded by the batcher's mutex.

    Attributes:
        sizes: How many batches were taken; at index k, those of 2**k to 2**(k + 1) - 1 jobs.
        nbytes: How many batches were taken; at index k, those of 2**k to 2**(k + 1) - 1 bytes, at index 0 also those
            without any.
        jobs: How many jobs they had.
        jobs_nbytes: How many bytes they had.
        reruns: How many jobs had to wait again since their worker died.
        quarantined: How many were given up since several workers had died of them.
        ended: How many jobs were computed.
        busy_s: For how many seconds slots computed them, or the front process.
        front_busy_s: For how many seconds the front process computed some of them.
    """

    def __init__(self) -> None:
        self.sizes = [0] * _SIZES
        self.nbytes = [0] * _NBYTES
        self.jobs = self.jobs_nbytes = self.reruns = self.quarantined = self.ended = 0
        self.busy_s = self.front_busy_s = 0.0

    def add(self, jobs: int, nbytes: int) -> None:
        """Counts a batch that was taken."""
        self.sizes[min(jobs.bit_length(), _SIZES) - 1] += 1
        self.nbytes[min(max(nbytes.bit_length(), 1), _NBYTES) - 1] += 1
        self.jobs += jobs
        self.jobs_nbytes += nbytes
