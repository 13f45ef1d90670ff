"""Keeps a process that cleans up after this one, if this one is killed; see `bngrad_server.runtime.leftovers`."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from bngrad_server.runtime import leftovers
from bngrad_server.runtime.processes import end_process

logger = logging.getLogger(__name__)

_EXIT_TIMEOUT_S = 5.0
_RESTART_DELAY_S = 1.0
"""Between two starts, so that a process that cannot live is not started all the time."""


class Janitor:
    """The process that cleans up, and the thread that starts another one if it dies."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = [leftovers.describe(path) for path in paths]
        self._closing = threading.Event()
        self._mutex = threading.Lock()
        self._process = self._start_process()
        self._thread = threading.Thread(target=self._run, name="janitor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Removes the paths and ends the process."""
        self._closing.set()
        with self._mutex:
            process = self._process
        assert process.stdin is not None
        process.stdin.close()
        end_process(process, _EXIT_TIMEOUT_S)
        self._thread.join()
        leftovers.remove(self._paths)  # which a process that was killed has not done

    def _run(self) -> None:
        started_at = time.monotonic()
        while True:
            code = self._process.wait()
            if self._closing.wait(max(started_at + _RESTART_DELAY_S - time.monotonic(), 0)):
                return
            logger.error("the janitor process ended with exit code %d and is started again", code)
            started_at = time.monotonic()
            with self._mutex, contextlib.suppress(OSError):  # no process or descriptor is left: tried again
                if not self._closing.is_set():
                    assert self._process.stdin is not None
                    self._process.stdin.close()
                    self._process = self._start_process()

    def _start_process(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-I", "-S", leftovers.__file__, *self._paths],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C of a terminal must reach only the front process
        )
