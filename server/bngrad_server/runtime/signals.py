"""Handles stop signals at once, even while the main thread waits."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def on_stop_signals(callback: Callable[[int], None]) -> None:
    """Calls ``callback``, in a thread of its own, with the number of each SIGTERM, SIGINT and SIGHUP from now on.

    SIGHUP comes when a terminal closes; where it is ignored, as under nohup(1), it stays so.
    Python runs signal handlers in the main thread between two bytecodes. For a signal that arrives just before that
    thread begins to wait, the handler would run only after the wait.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    for number in _STOP:
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
            continue
        signal.signal(number, lambda number, frame: None)  # replaces the default, which ends the process

    def run() -> None:
        while True:
            number = os.read(reading, 1)[0]
            if number in _STOP:
                callback(number)

    threading.Thread(target=run, name="signals", daemon=True).start()
