"""Shared memory that a server may still write, though nobody waits for the answer any more."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bngrad._cancellation import Cancellation
from bngrad._deadline import Deadline
from bngrad._results import Array
from bngrad._shared_memory.farewell import Farewell
from bngrad._shared_memory.pool import Region

_FIRST_POLL_S = 0.001
_LONGEST_POLL_S = 0.1


class _Doubt(NamedTuple):
    result: Array
    region: Region
    farewell: Farewell


class Doubts:
    """Keeps the results of calls that failed from meeting other tensors, until the server has done with them."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._doubtful: list[_Doubt] = []
        self._closed = False

    def add(self, result: Array, region: Region, farewell: Farewell) -> None:
        """Keeps a result, the lease of its region, which the caller holds and hands over, and the end of its call."""
        doubt = _Doubt(result, region, farewell)
        with self._mutex:
            if self._closed:
                _give_up(doubt)
            else:
                self._doubtful.append(doubt)

    def settle(self, arrays: Sequence[Array]) -> Array | None:
        """Lets go what servers have done with.

        Returns:
            The first of the arrays whose memory is still in doubt.
        """
        if not self._doubtful:
            return None
        with self._mutex:
            heard: list[_Doubt] = []
            unheard: list[_Doubt] = []
            for doubt in self._doubtful:
                (heard if doubt.farewell.is_heard() else unheard).append(doubt)
            # Only now: a call that a server has not begun yet does not use its region yet either.
            in_use = {region: region.is_in_use() for region in {doubt.region for doubt in heard}}
            for doubt in heard:
                if not in_use[doubt.region]:
                    doubt.region.close()
            self._doubtful = unheard + [doubt for doubt in heard if in_use[doubt.region]]
            doubtful = [doubt.result for doubt in self._doubtful]
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
            self._closed = True
            for doubt in self._doubtful:
                _give_up(doubt)
            self._doubtful = []


def _give_up(doubt: _Doubt) -> None:
    doubt.region.close()
    doubt.farewell.close()
