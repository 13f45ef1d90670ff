"""What the batcher counts, from the start."""

from __future__ import annotations

_SIZES = 16
_NBYTES = 41


class BatchCounts:
    """Counters; guarded by the batcher's mutex.

    Attributes:
        sizes: How many batches were taken; at index k, those of 2**k to 2**(k + 1) - 1 jobs.
        nbytes: Alike, for the sizes of their tensors in bytes; the first one has those without any as well.
        jobs: How many jobs they had.
        jobs_nbytes: How many bytes they had.
        reruns: How many jobs had to wait again since their worker died.
        quarantined: How many were given up since several workers had died of them.
    """

    def __init__(self) -> None:
        self.sizes = [0] * _SIZES
        self.nbytes = [0] * _NBYTES
        self.jobs = self.jobs_nbytes = self.reruns = self.quarantined = 0

    def add(self, jobs: int, nbytes: int) -> None:
        """Counts a batch that was taken, of so many jobs and bytes."""
        self.sizes[min(jobs.bit_length(), _SIZES) - 1] += 1
        self.nbytes[min(max(nbytes.bit_length(), 1), _NBYTES) - 1] += 1
        self.jobs += jobs
        self.jobs_nbytes += nbytes
