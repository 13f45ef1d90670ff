"""Slows down chunks of a few bytes, each of which costs its thread as much as a large one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_AT_A_TIME = 32
"""How many short chunks a thread receives before it rests."""
_REST = 9
"""How many times as long as it has received them."""
_LONGEST_REST_S = 1.0


class ShortChunks:
    """Has the threads that receive short chunks rest, so that these take about a tenth of a core all together."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._rests_end_at = 0.0

    def counter(self) -> Callable[[], None]:
        """Returns what the thread that receives a tensor calls after each short chunk; it rests now and then."""
        count, began = 0, time.thread_time()

        def count_chunk() -> None:
            nonlocal count, began
            count += 1
            if count % _AT_A_TIME == 0:
                time.sleep(self._rest_s(time.thread_time() - began))
                began = time.thread_time()

        return count_chunk

    def _rest_s(self, spent_s: float) -> float:
        """Returns how long to rest: the rests of all threads follow one another."""
        with self._mutex:
            now = time.monotonic()
            self._rests_end_at = max(self._rests_end_at, now) + _REST * spent_s
            return min(self._rests_end_at - now, _LONGEST_REST_S)
