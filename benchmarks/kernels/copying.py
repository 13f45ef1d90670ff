"""A plain copy with all threads, for the floor."""

from __future__ import annotations

import numba

from bngrad_kernels.problem import Array


@numba.njit(parallel=True, cache=True)
def copy(source: Array, destination: Array) -> None:
    for index in numba.prange(source.size):
        destination[index] = source[index]
