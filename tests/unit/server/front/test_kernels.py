"""The kernels of the front process."""

from __future__ import annotations

import threading

import pytest
from tests.clock import Clock
from tests.servers import wait_until

from bngrad_kernels import backends
from bngrad_kernels.cpu.backend import CpuBackend
from bngrad_kernels.spec import FLOAT32, Spec
from bngrad_server.front import kernels as front_kernels
from bngrad_server.front.kernels import FrontKernels

SPEC = Spec(FLOAT32, (2, 3, 5, 7), 3)


def test_without_a_thread_to_load_a_kernel_it_is_loaded_later() -> None:
    backends.create("cpu", threads=1).warm_up()  # has the kernel in the cache
    kernels = FrontKernels(threads=1)
    threading.stack_size(1 << 47)  # more than a process can address, so no thread starts
    try:
        assert not kernels.has(SPEC)
    finally:
        threading.stack_size(0)
    wait_until(lambda: kernels.has(SPEC))


@pytest.mark.parametrize("error", [None, RuntimeError("the code is damaged")], ids=["not compiled", "damaged"])
def test_a_kernel_that_cannot_be_loaded_is_looked_for_once_a_second(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception | None
) -> None:
    looked_for: list[int] = []

    def load_compiled(backend: CpuBackend, dtype: object, order: int) -> bool:
        looked_for.append(order)
        if error is not None:
            raise error
        return False

    def is_loading() -> bool:
        return any(each.name == "load-kernel" for each in threading.enumerate())

    clock, kernels = Clock(), FrontKernels(threads=1)
    monkeypatch.setattr(front_kernels, "time", clock)
    monkeypatch.setattr(CpuBackend, "load_compiled", load_compiled)
    for count in (1, 2):
        assert [kernels.has(SPEC) for _ in range(3)] == [False] * 3
        wait_until(lambda: not is_loading())
        assert not kernels.has(SPEC)
        assert looked_for == [SPEC.order] * count
        clock.now += front_kernels._LOAD_INTERVAL_S
    assert len(caplog.messages) == (2 if error else 0)
