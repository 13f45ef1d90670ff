"""Fills the cache with kernels.

``python -m bngrad_kernels.cpu.machine_code.warm`` does that for this processor at the lowest priority, and without the
first kernel, which the workers of a server compile themselves. It prints a line for each kernel that it has compiled:
its name, and a sentence if that failed. It ends when its standard input ends.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed

from bngrad_kernels.cpu.machine_code import loader
from bngrad_kernels.cpu.machine_code.kernels import FIRST, KERNELS, Kernel, host
from bngrad_kernels.errors import DeviceUnavailableError

_LOWEST_PRIORITY = 19


def missing(cpu: str) -> list[Kernel]:
    """The kernels that the cache lacks for a level of processors."""
    return [kernel for kernel in KERNELS if not loader.is_compiled(kernel, cpu)]


def fill(cpu: str, kernels: Iterable[Kernel], jobs: int, lock: str = loader.LOCK) -> Iterator[tuple[Kernel, str]]:
    """Compiles kernels, ``jobs`` at a time; yields each with an empty string, or a sentence why it failed.

    For the lock see `bngrad_kernels.cpu.machine_code.loader.compile_once`.
    """
    with ThreadPoolExecutor(jobs) as threads:
        try:
            futures = {threads.submit(_compile, kernel, cpu, lock): kernel for kernel in kernels}
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            threads.shutdown(cancel_futures=True)  # after Ctrl-C, no further kernel is begun


def _compile(kernel: Kernel, cpu: str, lock: str) -> str:
    try:
        loader.compile_once(kernel, cpu, lock)
    except DeviceUnavailableError as error:
        return str(error)
    except OSError as error:
        return f"the kernel {kernel} cannot be compiled: {error}"
    return ""


def main() -> None:
    """Compiles what the cache lacks, in the background of a server."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server says when to end
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # no traceback if the server was killed
    os.nice(_LOWEST_PRIORITY)
    threading.Thread(target=_end_with_input, daemon=True).start()
    jobs = min(2, len(os.sched_getaffinity(0)))
    kernels = [kernel for kernel in missing(host()) if kernel != FIRST]
    for kernel, failure in fill(host(), kernels, jobs, loader.BACKGROUND_LOCK):
        print(kernel, failure, flush=True)


def _end_with_input() -> None:
    while os.read(0, 1):
        pass
    os._exit(0)  # what is being compiled is finished, and then used by the next start


if __name__ == "__main__":
    main()
