"""The time in which kernels are still to be compiled."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

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


def assert_prints_the_same(code: str, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asserts that a program's lines do not depend on whether its kernel, that of float32, is compiled yet.

    But for the last one, which it has to print: ``client.server_info().compiling``.
    """
    *expected, compiling_nothing = _lines(code)
    monkeypatch.setenv("XDG_CACHE_HOME", str(empty_cache))
    with compiling():
        *found, compiling_one = _lines(code)
    assert found == expected
    assert (compiling_nothing, compiling_one) == ("()", "('float32-1',)")


def _lines(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return done.stdout.splitlines()
