"""Compiles the CPU kernels that the cache lacks, beside the workers and at the lowest priority."""

from __future__ import annotations

import logging
import subprocess
import threading
import time

from bngrad_kernels.child import module_command
from bngrad_server.runtime.processes import end_process

logger = logging.getLogger(__name__)

_EXIT_TIMEOUT_S = 5.0


class KernelCompiler:
    """The thread that watches the process that compiles; see `bngrad_kernels.cpu.machine_code.warm`.

    The workers compile the first kernel themselves, and any other that a request needs before its turn has come.
    """

    def __init__(self) -> None:
        """Starts nothing yet."""
        self._compiling: tuple[str, ...] = ()
        self._process: subprocess.Popen[str] | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kernel-compiler", daemon=True)

    @property
    def compiling(self) -> tuple[str, ...]:
        """The kernels that are still to be compiled, such as ``float32-2``: dtype and order."""
        if not self._compiling:
            return ()
        missing = _missing()  # requests may have had some compiled meanwhile
        return tuple(name for name in self._compiling if name in missing)

    def start(self) -> None:
        """Starts the process and the thread, if the cache lacks a kernel."""
        if not _missing():
            return
        self._process = subprocess.Popen(  # noqa: S603 - our own module
            module_command("bngrad_kernels.cpu.machine_code.warm"),
            stdin=subprocess.PIPE,  # the process ends once this one has closed it
            stdout=subprocess.PIPE,
            text=True,
        )
        self._thread.start()

    def close(self) -> None:
        """Ends the process."""
        self._closing = True
        if self._process is not None and self._process.stdin is not None:
            self._process.kill()  # what it has begun is finished, and then used by the next start
            self._thread.join()
            self._process.stdin.close()

    def _run(self) -> None:
        """Reads what the process prints: what is missing, then each kernel once it is compiled, or why it is not."""
        process, started_at = self._process, time.monotonic()
        assert process is not None
        assert process.stdout is not None
        self._compiling = tuple(process.stdout.readline().split())
        all_succeed = bool(self._compiling)
        if self._compiling:
            kernels = ", ".join(self._compiling)
            logger.info("compiling %d more kernels in the background: %s", len(self._compiling), kernels)
        for line in process.stdout:
            name, _, failure = line.strip().partition(" ")
            self._compiling = tuple(kernel for kernel in self._compiling if kernel != name)
            if failure:
                all_succeed = False
                logger.warning("%s; requests for it will try again", failure)
        process.stdout.close()
        code = end_process(process, _EXIT_TIMEOUT_S)
        if code and not self._closing:
            logger.warning("the compiler of kernels ended with exit code %d; requests compile what they need", code)
        elif all_succeed and not self._closing:
            logger.info("all kernels are compiled, after %.0f s", time.monotonic() - started_at)
        self._compiling = ()


def _missing() -> set[str]:
    """The names of the kernels that the cache lacks, but for the first."""
    from bngrad_kernels.cpu.machine_code import warm  # noqa: PLC0415 - a server of GPUs does not need LLVM
    from bngrad_kernels.cpu.machine_code.kernels import KERNELS  # noqa: PLC0415

    try:
        return set(map(str, warm.missing_in_background()))
    except OSError:
        return set(map(str, KERNELS))  # the process has the same error, and the log then tells of it
