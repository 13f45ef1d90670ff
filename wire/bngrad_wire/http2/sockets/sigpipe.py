"""SIGPIPE, which ends a process as it sends to a peer that has gone. Python ignores it, but some programs do not."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_back() -> Iterator[None]:
    """Keeps SIGPIPE from this thread, for system calls that do not take MSG_NOSIGNAL."""
    if signal.getsignal(signal.SIGPIPE) != signal.SIG_DFL:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
    try:
        yield
    finally:
        if signal.SIGPIPE not in before:
            signal.sigtimedwait({signal.SIGPIPE}, 0)  # takes the one that came meanwhile
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
