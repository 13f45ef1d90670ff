"""The backend that waits for no compiler."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.clock import Clock
from tests.kernels import backends, cold_cache
from tests.kernels.problems import assert_right, bits, clear_outputs, random_problem, spec_of
from tests.servers import wait_until

from bngrad_kernels.cpu.machine_code import loader
from bngrad_kernels.cpu.machine_code.kernels import FIRST, Kernel, host
from bngrad_kernels.cpu.records import FIRST_ORDER
from bngrad_kernels.cpu.uncompiled import backend as uncompiled
from bngrad_kernels.cpu.uncompiled import first_order
from bngrad_kernels.cpu.uncompiled.backend import EagerBackend
from bngrad_kernels.errors import DeviceUnavailableError
from bngrad_kernels.problem import Problem, address_of_array

PROBLEM = random_problem(spec_of(1, (3, 5, 7)))


@pytest.fixture
def compiled() -> Path:
    """A file with the first kernel."""
    backends.create("cpu").run([PROBLEM])
    clear_outputs(PROBLEM)
    return loader.path(FIRST, host())


@pytest.fixture
def fill(compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Empties the cache; what it returns puts the first kernel there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def put() -> None:
        shutil.copy(compiled, loader.path(FIRST, host()))

    return put


@contextmanager
def compiling() -> Iterator[None]:
    """As `cold_cache.compiling`; the threads of this process that wait for it have ended afterwards."""
    with cold_cache.compiling():
        yield
    wait_until(lambda: not compilers())


def compilers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "compile-kernel"]


def run(backend: EagerBackend) -> list[bytes]:
    clear_outputs(PROBLEM)
    backend.run([PROBLEM])
    assert_right(PROBLEM)
    return bits(PROBLEM)


def test_the_bits_do_not_change_once_the_kernel_is_compiled(fill: Callable[[], None]) -> None:
    backend = EagerBackend(threads=2)
    with compiling():
        backend.warm_up()
        in_numpy = [run(backend) for _ in range(2)]
        assert len(compilers()) == 1
        assert not backend._kernels
        fill()
        assert [run(backend)] * 2 == in_numpy
        assert backend._kernels


@pytest.mark.parametrize("has_scale", [True, False])
def test_at_given_addresses_the_bits_do_not_change_either(fill: Callable[[], None], has_scale: bool) -> None:
    problem = random_problem(spec_of(1, (3, 5, 7)))
    if not has_scale:
        problem.scale = None
    tensors = [getattr(problem, name) for name in FIRST_ORDER]
    addresses = [0 if tensor is None else address_of_array(tensor) for tensor in tensors]
    backend = EagerBackend(threads=2)

    def computed() -> list[bytes]:
        clear_outputs(problem)
        compute(*addresses)
        assert_right(problem)
        return bits(problem)

    with compiling():
        compute = backend.bound_at(problem.spec)
        in_numpy = computed()
        assert (backend.compiling, backend._kernels) == (("float32-1",), {})
        fill()
        assert computed() == in_numpy
        assert backend.compiling == ()
        assert backend._kernels


def test_flushing_of_subnormal_numbers_in_the_calling_thread_changes_no_bit(fill: Callable[[], None]) -> None:
    problem, again = (random_problem(spec_of(1, (3, 5, 7))) for _ in range(2))
    for each in (problem, again):
        each.y_backprop *= 1e-38
    with compiling():
        EagerBackend(threads=2).run([problem])
        torch.set_flush_denormal(True)
        try:
            EagerBackend(threads=2).run([again])
            still_flushes = float(torch.tensor(1e-38) * 0.1) == 0
        finally:
            torch.set_flush_denormal(False)
        fill()
    assert still_flushes
    assert bits(problem) == bits(again)


def test_a_kernel_is_used_once_its_thread_has_it(fill: Callable[[], None]) -> None:
    backend = EagerBackend(threads=2)
    with compiling():
        in_numpy = run(backend)
        fill()
    assert backend._kernels
    assert run(backend) == in_numpy


def test_kernels_are_compiled_one_after_the_other(fill: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Kernel] = []
    monkeypatch.setattr(loader, "load", begun.append)
    backend = EagerBackend(threads=2)
    with backend._one_at_a_time:
        for order in (1, 2):
            backend.run([random_problem(spec_of(order, (3, 5, 7)))])
        assert len(compilers()) == 2
        assert begun == []
    wait_until(lambda: not compilers())
    assert sorted(begun) == [("float32", 1), ("float32", 2)]


def test_a_kernel_that_cannot_be_compiled_is_tried_again_after_a_minute(
    fill: Callable[[], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NUMBA_CPU_NAME", "no-such-processor")
    clock = Clock()
    monkeypatch.setattr(uncompiled, "time", clock)
    backend = EagerBackend(threads=2)
    for tries in (1, 2):
        for _ in range(2):
            run(backend)
            wait_until(lambda: not compilers())
        assert len(caplog.messages) == tries
        clock.now += uncompiled._RETRY_AFTER_S
    assert caplog.messages[0].startswith("the kernel float32-1 could not be compiled: LLVM ")
    assert caplog.messages[0].endswith("; NumPy computes what needs it")


def test_numpy_computes_where_there_is_no_folder_for_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (file := tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    monkeypatch.setattr(tempfile, "tempdir", str(file))
    backend = EagerBackend(threads=2)
    backend.warm_up()
    run(backend)
    wait_until(lambda: not compilers())
    assert re.match(r"the kernel float32-1 cannot be compiled or read: .*; NumPy computes", caplog.messages[0])


def test_a_large_problem_of_the_second_order_waits_for_its_kernel(
    fill: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CPU_NAME", "no-such-processor")
    problem = random_problem(spec_of(2, (3, 5, 7)))
    backend = EagerBackend(threads=2)
    backend.run([problem])
    assert_right(problem)
    monkeypatch.setattr(uncompiled, "_MAX_SECOND_ORDER_ELEMENTS", 3 * 5 * 7 - 1)
    with pytest.raises(DeviceUnavailableError, match="the kernel float32-2 could not be compiled"):
        backend.run([problem])
    wait_until(lambda: not compilers())


def test_numpy_leaves_a_core_to_the_compiler(fill: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    priorities: list[int] = []
    priority_of_thread = partial(os.getpriority, os.PRIO_PROCESS)
    monkeypatch.setattr(first_order, "run", lambda _: priorities.append(priority_of_thread(threading.get_native_id())))
    own = priority_of_thread(threading.get_native_id())
    with compiling():
        EagerBackend(threads=2).run([PROBLEM, PROBLEM])
        fill()
    assert priorities == [max(own, uncompiled._PRIORITY)] * 2
    assert priority_of_thread(threading.get_native_id()) == own


def test_a_failure_of_numpy_is_one_of_the_problem(fill: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Problem) -> None:
        raise MemoryError

    monkeypatch.setattr(first_order, "run", fail)
    with compiling():
        with pytest.raises(MemoryError):
            EagerBackend(threads=2).run([PROBLEM])
        fill()


def test_without_a_thread_a_later_problem_begins_to_compile(fill: Callable[[], None]) -> None:
    backend = EagerBackend(threads=2)
    with compiling():
        threading.stack_size(1 << 47)  # more than a process can address, so no thread starts
        try:
            run(backend)
        finally:
            threading.stack_size(0)
        assert not compilers()
        run(backend)
        assert compilers()
        fill()
