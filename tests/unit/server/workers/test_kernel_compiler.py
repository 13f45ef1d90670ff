"""The compiler of kernels in the background."""

from __future__ import annotations

import logging
import os
import signal
from contextlib import closing
from pathlib import Path

import pytest
from tests.servers import children_of, wait_until

from bngrad_kernels import compiled_code
from bngrad_kernels.cpu.machine_code import loader, warm
from bngrad_kernels.cpu.machine_code.kernels import FIRST, KERNELS, Kernel, host
from bngrad_server.workers.kernel_compiler import KernelCompiler


def put(kernel: Kernel) -> None:
    """Has the cache hold something as the code of a kernel."""
    compiled_code.write(loader.path(kernel, host()), b"code")


def test_a_compiler_that_is_killed_has_not_compiled_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    caplog.set_level(logging.INFO)
    with closing(KernelCompiler()) as compiler:
        compiler.start()
        (process,) = children_of(os.getpid(), warm.__name__)
        for each in (process, *process.children()):
            each.send_signal(signal.SIGKILL)
        wait_until(lambda: compiler.compiling == (str(FIRST),))  # which workers compile
    said = "the compiler of kernels ended with exit code -9; requests compile what they need"
    assert [record.getMessage() for record in caplog.records][1:] == [said]


def test_a_kernel_that_a_request_had_compiled_is_no_longer_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with closing(KernelCompiler()) as compiler:
        compiler.start()
        last = compiler.compiling[-1]
        put(next(kernel for kernel in KERNELS if str(kernel) == last))
        assert last not in compiler.compiling


def test_all_kernels_are_compiled_once_workers_have_compiled_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    caplog.set_level(logging.INFO)
    for kernel in KERNELS:
        if kernel != FIRST:
            put(kernel)
    with closing(KernelCompiler()) as compiler:
        compiler.start()
        wait_until(lambda: children_of(os.getpid(), warm.__name__) == [])
        assert compiler.compiling == (str(FIRST),)
        put(FIRST)
        assert not compiler.compiling
        wait_until(lambda: len(caplog.records) == 2)
    begun, ended = (record.getMessage() for record in caplog.records)
    assert begun == "compiling float32-1; until one is there, NumPy computes what needs it, more slowly"
    assert ended.startswith("all kernels are compiled, after ")


def test_where_a_kernel_is_not_kept_no_client_waits_for_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    failing, *others = [kernel for kernel in KERNELS if kernel != FIRST]
    for kernel in others:
        put(kernel)
    loader.path(failing, host()).with_suffix(loader.BACKGROUND_LOCK).mkdir()
    with closing(KernelCompiler()) as compiler:
        compiler.start()
        assert compiler.compiling == (str(FIRST), str(failing))
        wait_until(lambda: not compiler.compiling)
    assert f"the kernel {failing} cannot be compiled: " in caplog.text


def test_no_process_is_started_when_all_kernels_are_compiled() -> None:
    list(warm.fill(host(), warm.missing(host()), len(os.sched_getaffinity(0))))
    with closing(KernelCompiler()) as compiler:
        compiler.start()
        assert children_of(os.getpid(), warm.__name__) == []
        assert compiler.compiling == ()
