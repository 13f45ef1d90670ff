"""Signals that are acted upon at once, whatever the main thread is waiting for."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

_STOP = (signal.SIGTERM, signal.SIGINT)


def on_stop_signals(act: Callable[[int], None]) -> None:
    """Calls ``act``, on a thread of its own, with the number of each SIGTERM and SIGINT from now on.

    Python runs a handler on the main thread, between two steps of its own: for a signal that comes just as that thread
    begins to wait, only after the wait.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    for number in _STOP:
        signal.signal(number, lambda number, frame: None)  # or the signal would end the process

    def run() -> None:
        while True:
            number = os.read(reading, 1)[0]
            if number in _STOP:
                act(number)

    threading.Thread(target=run, name="signals", daemon=True).start()
