"""Child processes: how they end, and that none outlives the process that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from typing import Any

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Makes the system kill this process when its parent dies, even if this one hangs or is stopped."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent has died already
        sys.exit()


def ignore_stop_signals() -> None:
    """Ignores signals to stop, which a whole process group gets: the parent decides when this one ends."""
    for ignored in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)


def end_process(process: subprocess.Popen[Any], timeout_s: float) -> int:
    """Waits for a child that was told to end, kills it after a timeout, and returns its exit code."""
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
