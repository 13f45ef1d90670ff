"""The time in which kernels are still to be compiled."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from bngrad_kernels.cpu.machine_code import loader
from bngrad_kernels.cpu.machine_code.kernels import KERNELS, host


@contextmanager
def compiling() -> Iterator[None]:
    """As if other processes compiled all kernels into the cache, for which every other process waits."""
    with ExitStack() as stack:
        for kernel in KERNELS:
            for suffix in (loader.LOCK, loader.BACKGROUND_LOCK):
                file = stack.enter_context(loader.path(kernel, host()).with_suffix(suffix).open("w"))
                fcntl.flock(file, fcntl.LOCK_EX)
        yield
