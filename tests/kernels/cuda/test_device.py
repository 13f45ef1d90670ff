"""The functions of CuPy that the CUDA device calls, as far as they can be called without a driver."""

from __future__ import annotations

from typing import Any

import pytest
from cupy.cuda import Event, MemoryPool, Stream, driver, memory, runtime

from bngrad_kernels.cuda import device

CALLS: list[tuple[Any, tuple[int, ...]]] = [
    (runtime.setDevice, (0,)),
    (runtime.getDeviceProperties, (0,)),
    (runtime.malloc, (1 << 20,)),
    (runtime.hostRegister, (1 << 20, 4096, device._PORTABLE)),
    (runtime.hostUnregister, (1 << 20,)),
    (runtime.memcpyAsync, (1 << 20, 1 << 21, 64, runtime.memcpyHostToDevice, 0)),
    (runtime.memcpy2DAsync, (1 << 20, 128, 1 << 21, 64, 64, 2, runtime.memcpyDeviceToHost, 0)),
    (runtime.memGetInfo, ()),
    (runtime.deviceGetPCIBusId, (0,)),
    (runtime.eventCreateWithFlags, (runtime.eventBlockingSync | runtime.eventDisableTiming,)),
    (runtime.eventSynchronize, (0,)),
]


def require_no_driver() -> None:
    """Skips the calling test if there is a driver, where the calls would have effects."""
    try:
        runtime.getDeviceCount()
    except runtime.CUDARuntimeError:
        return
    pytest.skip("there is a GPU; make gpu-test shows more")


@pytest.mark.parametrize(("function", "arguments"), CALLS, ids=[function.__name__ for function, _ in CALLS])
def test_cupy_takes_what_it_is_called_with(function: Any, arguments: tuple[int, ...]) -> None:
    require_no_driver()
    with pytest.raises(runtime.CUDARuntimeError, match=r"cudaErrorInsufficientDriver|cudaErrorNoDevice") as raised:
        function(*arguments)
    assert raised.value.status in (35, 100)  # the attribute by which a stream recognises a lack of memory
    assert not issubclass(driver.CUDADriverError, runtime.CUDARuntimeError)  # so a device's errors have to name both


def test_cupy_has_what_copies_ahead_need() -> None:
    for function in (
        MemoryPool.malloc,
        MemoryPool.free_all_blocks,
        MemoryPool.total_bytes,
        Stream.wait_event,
        Event.record,
        Event.synchronize,
    ):
        assert callable(function)
    assert issubclass(memory.OutOfMemoryError, MemoryError)
    assert runtime.memcpyDeviceToDevice == 3
    require_no_driver()
    with pytest.raises(runtime.CUDARuntimeError, match=r"cudaErrorInsufficientDriver|cudaErrorNoDevice"):
        MemoryPool().set_limit(size=1 << 30)
