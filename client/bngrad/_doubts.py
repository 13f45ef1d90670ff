"""Shared memory that a server may still write, though nobody waits for the answer any more."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from bngrad._cancellation import Cancellation
from bngrad._deadline import Deadline
from bngrad._memory import Region
from bngrad._results import Array

_FIRST_POLL_S = 0.001
_LONGEST_POLL_S = 0.1


class Doubts:
    """Keeps the results of calls that failed from meeting other tensors, until the server has done with them."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._doubtful: list[tuple[Array, Region]] = []

    def add(self, result: Array, region: Region) -> None:
        """Keeps a result, and the lease of its region, which the caller holds and hands over."""
        with self._mutex:
            self._doubtful.append((result, region))

    def settle(self, arrays: Sequence[Array]) -> Array | None:
        """Lets go what servers have done with.

        Returns:
            The first of the arrays whose memory is still in doubt.
        """
        if not self._doubtful:
            return None
        with self._mutex:
            in_use = {region: region.is_in_use() for region in {region for _, region in self._doubtful}}
            for _, region in self._doubtful:
                if not in_use[region]:
                    region.close()
            self._doubtful = [(result, region) for result, region in self._doubtful if in_use[region]]
            doubtful = [result for result, _ in self._doubtful]
        return next((array for array in arrays for other in doubtful if np.may_share_memory(array, other)), None)

    def wait(self, arrays: Sequence[Array], deadline: Deadline, cancellation: Cancellation) -> bool:
        """Waits until no array is in doubt, and says whether that came about in time."""
        poll_s = _FIRST_POLL_S
        while self.settle(arrays) is not None:
            if cancellation.cancelled or not deadline.allows(poll_s):
                return False
            cancellation.sleep(poll_s)
            poll_s = min(2 * poll_s, _LONGEST_POLL_S)
        return True

    def close(self) -> None:
        """Gives the leases up; the memory itself stays as long as its arrays."""
        with self._mutex:
            for _, region in self._doubtful:
                region.close()
            self._doubtful = []
