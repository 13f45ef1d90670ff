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
_LOOK_EVERY_S = 1.0


class KernelCompiler:
    """The thread that watches the process that compiles; see `bngrad_kernels.cpu.machine_code.warm`.

    The workers compile the first kernel themselves, and any other that a request needs before its turn has come.
    """

    def __init__(self) -> None:
        """Starts nothing yet."""
        self._compiling: tuple[str, ...] = ()
        self._process: subprocess.Popen[str] | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kernel-compiler", daemon=True)

    @property
    def compiling(self) -> tuple[str, ...]:
        """The kernels that are still to be compiled, such as ``float32-2``: dtype and order."""
        missing = _missing() if self._compiling else ()  # workers may have compiled some meanwhile
        return tuple(name for name in self._compiling if name in missing)

    def start(self) -> None:
        """Starts the process and the thread, if the cache lacks a kernel."""
        self._compiling = _missing()
        if not self._compiling:
            return
        kernels = ", ".join(self._compiling)
        logger.info("compiling %s; until one is there, NumPy computes what needs it, more slowly", kernels)
        self._process = subprocess.Popen(  # noqa: S603 - our own module
            module_command("bngrad_kernels.cpu.machine_code.warm"),
            stdin=subprocess.PIPE,  # the process ends once this one has closed it
            stdout=subprocess.PIPE,
            text=True,
        )
        self._thread.start()

    def close(self) -> None:
        """Ends the process."""
        self._closed.set()
        if self._process is not None and self._process.stdin is not None:
            self._process.kill()  # what it has begun is finished, and then used by the next start
            self._thread.join()
            self._process.stdin.close()

    def _run(self) -> None:
        """Follows what is compiled, and logs how it ends."""
        process, started_at = self._process, time.monotonic()
        assert process is not None
        failed = self._read(process)
        code = end_process(process, _EXIT_TIMEOUT_S)
        if code and not self._closed.is_set():
            logger.warning("the compiler of kernels ended with exit code %d; requests compile what they need", code)
        # If one could not be kept, the first, which workers compile, hardly will be: no client should wait for it.
        self._compiling = () if failed else tuple(name for name in self._compiling if name == _first())
        while self.compiling and not self._closed.wait(_LOOK_EVERY_S):
            pass  # workers still compile the first kernel
        self._compiling = ()
        if not (failed or code or self._closed.is_set()):
            logger.info("all kernels are compiled, after %.0f s", time.monotonic() - started_at)

    def _read(self, process: subprocess.Popen[str]) -> bool:
        """Reads a line for each kernel that is compiled, or why it is not; returns whether any is not."""
        assert process.stdout is not None
        failed = False
        for line in process.stdout:
            name, _, failure = line.strip().partition(" ")
            self._compiling = tuple(kernel for kernel in self._compiling if kernel != name)
            if failure:
                failed = True
                logger.warning("%s; requests for it will try again", failure)
        process.stdout.close()
        return failed


def _missing() -> tuple[str, ...]:
    """The names of the kernels that the cache lacks."""
    from bngrad_kernels.cpu.machine_code import warm  # noqa: PLC0415 - a server of GPUs does not need LLVM
    from bngrad_kernels.cpu.machine_code.kernels import host  # noqa: PLC0415

    return tuple(map(str, warm.missing(host())))


def _first() -> str:
    """The name of the kernel that workers compile."""
    from bngrad_kernels.cpu.machine_code.kernels import FIRST  # noqa: PLC0415

    return str(FIRST)
