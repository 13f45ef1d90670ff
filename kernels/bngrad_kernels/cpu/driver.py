"""Shares out the work to threads."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import from_dtype, njit, prange, types

from bngrad_kernels.cpu import columns, planes
from bngrad_kernels.cpu.cache import compiled
from bngrad_kernels.cpu.groups import begin, finish
from bngrad_kernels.cpu.plan import RECORD

_columns_sums, _columns_apply = columns.sums, columns.apply
_planes_sums, _planes_apply = planes.sums, planes.apply

_SUMS, _APPLY = np.int64(0), np.int64(1)


_BYTES = types.Array(types.uint8, 1, "C", readonly=True)
_RECORDS = types.Array(from_dtype(RECORD), 1, "C")


@compiled([types.void(_RECORDS, *[types.int64] * 3, *[_BYTES] * 8)])
def place(
    records: Any, i: int, by_group: int, workspace: int, y_backprop: Any, x: Any, x_backprop: Any,
    scale: Any, mean: Any, reserve_space_2: Any, scale_backprop: Any, offset_backprop: Any,
) -> None:  # fmt: skip
    """Completes a record: where the arrays are, which takes Python ten times as long. An empty scale is none."""
    record = records[i]
    record.by_group, record.workspace = by_group, workspace
    record.y_backprop, record.x = y_backprop.ctypes.data, x.ctypes.data
    record.scale = scale.ctypes.data if scale.size else 0
    record.mean, record.reserve_space_2 = mean.ctypes.data, reserve_space_2.ctypes.data
    record.x_backprop = x_backprop.ctypes.data
    record.scale_backprop, record.offset_backprop = scale_backprop.ctypes.data, offset_backprop.ctypes.data
    if record.x_backprop % 64:
        record.streams = 0


@compiled(parallel=True, nogil=True, error_model="numpy")
def run(tag: Any, records: Any, threads: int) -> None:
    """Computes problems of one element type: a single one with all threads, several with one thread each."""
    if threads == 1 or len(records) > 1:
        for thread in prange(threads):
            _share_of_problems(tag, records, np.int64(thread), threads)
    elif records[0].by_group:
        for thread in prange(threads):
            _share_of_groups(tag, records[0], np.int64(thread), threads)
    else:
        for g in range(records[0].groups):
            begin(records[0], g, np.int64(0))
            for thread in prange(threads):
                _share_of_tiles(tag, records[0], g, _SUMS, np.int64(thread), threads)
            finish(records[0], g, np.int64(0))
            if records[0].is_training:
                for thread in prange(threads):
                    _share_of_tiles(tag, records[0], g, _APPLY, np.int64(thread), threads)


@njit(error_model="numpy")
def _share_of_problems(tag: Any, records: Any, thread: int, threads: int) -> None:
    for i in range(thread, len(records), threads):
        _share_of_groups(tag, records[i], np.int64(0), np.int64(1))


@njit(error_model="numpy")
def _share_of_groups(tag: Any, p: Any, thread: int, threads: int) -> None:
    for g in range(thread * p.groups // threads, (thread + 1) * p.groups // threads):
        begin(p, g, thread)
        for t in range(p.tiles):
            _tile(tag, p, g, t, thread, _SUMS)
        finish(p, g, thread)
        if p.is_training:
            for back in range(p.tiles):
                _tile(tag, p, g, p.tiles - 1 - back, thread, _APPLY)


@njit(error_model="numpy")
def _share_of_tiles(tag: Any, p: Any, g: int, work: int, thread: int, threads: int) -> None:
    first, last = thread * p.tiles // threads, (thread + 1) * p.tiles // threads
    for i in range(last - first):
        _tile(tag, p, g, last - 1 - i if work == _APPLY else first + i, np.int64(0), work)


@njit(error_model="numpy")
def _tile(tag: Any, p: Any, g: int, t: int, slot: int, work: int) -> None:
    if work == _SUMS:
        if p.is_planes:
            _planes_sums(tag, p, g, t, slot)
        else:
            _columns_sums(tag, p, g, t, slot)
    elif p.is_planes:
        _planes_apply(tag, p, g, t, slot)
    else:
        _columns_apply(tag, p, g, t, slot)
