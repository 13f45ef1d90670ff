"""A strict stand-in for CuPy: what the CUDA backend calls, with CuPy's own types and order of arguments.

With this folder before CuPy on its path, a process has one GPU, which a CPU emulates. CuPy takes plain integers only,
and so does this. The kernels are those that ``EMULATED_KERNELS`` names; incidents are in `cupy.incidents`.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import numpy as np

from cupy import cuda, incidents
from cupy.cuda import runtime

__version__ = "14.2.0"

_KERNELS = ctypes.CDLL(os.environ["EMULATED_KERNELS"])
_STATIC_SHARED_NBYTES = 20752
_MOST_SHARED_NBYTES, _SHARED_NBYTES_UNASKED = 227 << 10, 48 << 10
_THREADS = 256
_MOST_BLOCKS, _OS_THREADS = 8, 2


class RawKernel:
    """A kernel of a loaded module."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._dynamic_nbytes = 0

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        return self._dynamic_nbytes

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, nbytes: int) -> None:
        runtime.require_ints(nbytes)
        if nbytes + _STATIC_SHARED_NBYTES > _MOST_SHARED_NBYTES:
            raise cuda.driver.CUDADriverError("CUDA_ERROR_INVALID_VALUE: invalid argument")
        self._dynamic_nbytes = nbytes

    def __call__(
        self,
        grid: tuple[int],
        block: tuple[int],
        args: tuple[Any, ...],
        *,
        shared_mem: int = 0,
        stream: cuda.Stream | None = None,
        enable_cooperative_groups: bool = False,
    ) -> None:
        require_tuple(grid)
        require_tuple(block)
        runtime.require_ints(*grid, *block, shared_mem)
        if [type(each) for each in args] != [np.uint64, np.uint64, np.uint32, np.uint64]:
            raise TypeError(f"the kernel's arguments are {args}")
        assert stream is not None, "a launch on the null stream waits for all others"
        assert not enable_cooperative_groups
        allowed = max(self._dynamic_nbytes, _SHARED_NBYTES_UNASKED - _STATIC_SHARED_NBYTES)
        if block != (_THREADS,) or not 0 < grid[0] < 1 << 31 or shared_mem > allowed:
            raise cuda.driver.CUDADriverError("CUDA_ERROR_INVALID_VALUE: invalid argument")
        if incidents.take("launch fails", self.name):
            raise cuda.driver.CUDADriverError("CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure")
        descriptors, work_tiles, tile_count, counter = map(int, args)
        if not incidents.take("nothing is written", self.name):
            _KERNELS.launch_kernel(
                _KERNELS[self.name],
                ctypes.c_void_p(descriptors),
                ctypes.c_void_p(work_tiles),
                ctypes.c_uint(tile_count),
                ctypes.c_void_p(counter),
                ctypes.c_size_t(shared_mem),
                min(grid[0], _MOST_BLOCKS),
                _OS_THREADS,
            )
        if incidents.take("hangs", self.name):
            stream.is_stuck = True


class RawModule:
    """Loaded machine code."""

    def __init__(self, *, code: str | None = None, path: str | None = None, options: tuple[str, ...] = ()) -> None:
        assert code is None
        assert type(path) is str
        assert Path(path).read_bytes().startswith(b"\x7fELF")

    def get_function(self, name: str) -> RawKernel:
        assert type(name) is str
        return RawKernel(name)


def require_tuple(value: Any) -> None:
    """Raises what Cython raises for an argument that has to be a tuple."""
    if type(value) is not tuple:
        raise TypeError(f"expected tuple, got {type(value).__name__}")
