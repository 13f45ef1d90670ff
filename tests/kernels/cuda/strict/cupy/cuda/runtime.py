"""The runtime's interface. Every number has to be a plain int, as for CuPy's functions."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from cupy import incidents

memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice = 1, 2, 3  # noqa: N816 - CuPy's names
OUT_OF_MEMORY = 2
_NAMES = {
    OUT_OF_MEMORY: "cudaErrorMemoryAllocation: out of memory",
    712: "cudaErrorHostMemoryAlreadyRegistered: part or all of the requested memory range is already mapped",
    713: "cudaErrorHostMemoryNotRegistered: pointer does not correspond to a registered memory region",
}
_TOTAL_NBYTES = 8 << 30
_mutex = threading.RLock()
_taken: list[int] = []
_registered: dict[int, int] = {}


class CUDARuntimeError(RuntimeError):
    """An error of the runtime's interface."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(_NAMES[status])


def require_ints(*numbers: Any) -> None:
    """Raises what CuPy raises for a number that is not an int, such as NumPy's."""
    for number in numbers:
        if type(number) is not int:
            raise TypeError(f"an integer is required, not {type(number).__name__}")


def take_memory(nbytes: int) -> None:
    """Takes memory of the GPU."""
    with _mutex:
        if nbytes > memGetInfo()[0]:
            raise CUDARuntimeError(OUT_OF_MEMORY)
        _taken.append(nbytes)


def give_memory(nbytes: int) -> None:
    """Gives memory of the GPU back."""
    with _mutex:
        _taken.remove(nbytes)


def most_pinned_nbytes() -> int:
    """The largest block of page-locked memory that there is."""
    nbytes: int = incidents.number("page-locked memory", _TOTAL_NBYTES)
    return nbytes


def memGetInfo() -> tuple[int, int]:  # noqa: N802
    """The free and the total memory; an incident leaves less of it."""
    return max(0, incidents.number("memory", _TOTAL_NBYTES) - sum(_taken)), _TOTAL_NBYTES


def getDeviceCount() -> int:  # noqa: N802
    return 1


def setDevice(device: int) -> None:  # noqa: N802
    require_ints(device)


def driverGetVersion() -> int:  # noqa: N802
    return 12090


def deviceGetPCIBusId(device: int) -> str:  # noqa: N802
    require_ints(device)
    return "0000:00:00.0"


def getDeviceProperties(device: int) -> dict[str, Any]:  # noqa: N802
    require_ints(device)
    return {
        "name": b"strict GPU",
        "totalGlobalMem": _TOTAL_NBYTES,
        "major": 9,
        "minor": 0,
        "multiProcessorCount": 6,
        "sharedMemPerBlockOptin": 227 << 10,
        "l2CacheSize": 1 << 20,
    }


def hostRegister(pointer: int, nbytes: int, flags: int) -> None:  # noqa: N802
    require_ints(pointer, nbytes, flags)
    if pointer in _registered:
        raise CUDARuntimeError(712)
    if nbytes > most_pinned_nbytes():
        raise CUDARuntimeError(OUT_OF_MEMORY)
    _registered[pointer] = nbytes


def hostUnregister(pointer: int) -> None:  # noqa: N802
    require_ints(pointer)
    if pointer not in _registered:
        raise CUDARuntimeError(713)
    del _registered[pointer]


def memcpyAsync(target: int, source: int, nbytes: int, kind: int, stream: int) -> None:  # noqa: N802
    require_ints(target, source, nbytes, kind, stream)
    if kind == memcpyDeviceToDevice:
        incidents.tell("copied on the device")
        if incidents.take("nothing is copied on the device"):
            return
    else:
        _require_whole(source if kind == memcpyHostToDevice else target, nbytes)
    ctypes.memmove(target, source, nbytes)


def memcpy2DAsync(  # noqa: N802
    target: int, target_pitch: int, source: int, source_pitch: int, width: int, height: int, kind: int, stream: int
) -> None:
    require_ints(target, target_pitch, source, source_pitch, width, height, kind, stream)
    assert width <= min(target_pitch, source_pitch)
    for row in range(height):
        ctypes.memmove(target + row * target_pitch, source + row * source_pitch, width)


def _require_whole(host: int, nbytes: int) -> None:
    """CUDA refuses a copy of which only a part lies in a piece of page-locked memory."""
    for start, size in _registered.items():
        begins, ends = start <= host < start + size, start < host + nbytes <= start + size
        if begins != ends:
            incidents.tell("a copy crosses the end of page-locked memory")
            raise CUDARuntimeError(713)
