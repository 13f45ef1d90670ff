"""The compiled entry points: `place` completes a record, `run` computes problems on a number of threads."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import from_dtype, prange, types

from bngrad_kernels.cpu import channel_stats, column_sums, plane_sums
from bngrad_kernels.cpu.cache import compiled, internal
from bngrad_kernels.cpu.plan import RECORD
from bngrad_kernels.cpu.second_order import channel_stats as channel_stats_2
from bngrad_kernels.cpu.second_order import column_sums as column_sums_2
from bngrad_kernels.cpu.second_order import plane_sums as plane_sums_2
from bngrad_kernels.cpu.simd import fence, out_of_line

_begin_first, _finish_first = channel_stats.begin, channel_stats.finish
_columns_sums, _columns_apply = column_sums.sums, column_sums.apply
_planes_sums, _planes_apply = plane_sums.sums, plane_sums.apply
_begin_second, _finish_second = channel_stats_2.begin, channel_stats_2.finish
_columns_sums_second, _columns_apply_second = column_sums_2.sums, column_sums_2.apply
_planes_sums_second, _planes_apply_second = plane_sums_2.sums, plane_sums_2.apply

_NOTHING, _PROBLEMS, _GROUPS, _SUMS, _APPLY = (np.int64(work) for work in range(5))


_BYTES = types.Array(types.uint8, 1, "C", readonly=True)
_RECORDS = types.Array(from_dtype(RECORD), 1, "C")


@compiled([types.void(_RECORDS, *[types.int64] * 3, *[_BYTES] * 8)])
def place(
    records: Any, i: int, by_group: int, workspace: int, y_backprop: Any, x: Any, x_backprop: Any,
    scale: Any, mean: Any, reserve_space_2: Any, scale_backprop: Any, offset_backprop: Any,
) -> None:  # fmt: skip
    """Writes the arrays' addresses to a record; Python would take ten times as long. An empty scale stands for None."""
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
    """Computes problems of one element type: a single one with all threads, several with one thread each.

    There is only one parallel loop, since Numba compiles all kernels again for each of them.
    """
    p = records[0]
    one_by_one = threads == 1 or len(records) > 1
    work = _PROBLEMS if one_by_one else _GROUPS if p.by_group else _SUMS
    g, may_repeat = np.int64(0), np.int64(1)
    while work != _NOTHING:
        if work == _SUMS and may_repeat:
            _begin(tag, p, g, np.int64(0))
        for thread in prange(threads):
            _share(tag, records, g, work, np.int64(thread), threads)
        repeats = work == _SUMS and _finish(p, g, np.int64(0), may_repeat)
        may_repeat = np.int64(not repeats)
        if not repeats:
            if work == _SUMS and p.is_training:
                work = _APPLY
            elif work >= _SUMS and g + 1 < p.groups:
                work, g = _SUMS, g + 1
            else:
                work = _NOTHING


@internal
def _share(tag: Any, records: Any, g: int, work: int, thread: int, threads: int) -> None:
    """Does one thread's share of the problems, of the first problem's groups, or of the tiles of its group ``g``."""
    if work == _PROBLEMS:
        for i in range(thread, len(records), threads):
            for group in range(records[i].groups):
                _group(tag, records[i], group, np.int64(0))
        return
    p = records[0]
    if work == _GROUPS:
        for group in range(thread * p.groups // threads, (thread + 1) * p.groups // threads):
            _group(tag, p, group, thread)
    else:
        first, last = thread * p.tiles // threads, (thread + 1) * p.tiles // threads
        _tiles(tag, p, g, first, last, np.int64(0), work)


@internal
def _group(tag: Any, p: Any, g: int, slot: int) -> None:
    out_of_line()
    _begin(tag, p, g, slot)
    _tiles(tag, p, g, np.int64(0), p.tiles, slot, _SUMS)
    if _finish(p, g, slot, np.int64(1)):
        _tiles(tag, p, g, np.int64(0), p.tiles, slot, _SUMS)
        _finish(p, g, slot, np.int64(0))
    if p.is_training:
        _tiles(tag, p, g, np.int64(0), p.tiles, slot, _APPLY)


@internal
def _begin(tag: Any, p: Any, g: int, slot: int) -> None:
    out_of_line()
    if p.order == 1:
        _begin_first(p, g, slot)
    else:
        _begin_second(tag, p, g, slot)


@internal
def _finish(p: Any, g: int, slot: int, may_repeat: int) -> bool:
    """Finishes a group's sums; returns true if they have to be taken again."""
    out_of_line()
    if p.order == 1:
        _finish_first(p, g, slot)
        return False
    again: bool = _finish_second(p, g, slot, may_repeat)
    return again


@internal
def _tiles(tag: Any, p: Any, g: int, first: int, last: int, slot: int, work: int) -> None:
    """Sums tiles in order, or writes their outputs in reverse order: what was read last is still in the cache."""
    out_of_line()
    for i in range(last - first):
        _tile(tag, p, g, first + i if work == _SUMS else last - 1 - i, slot, work)
    if p.streams:
        fence()


@internal
def _tile(tag: Any, p: Any, g: int, t: int, slot: int, work: int) -> None:
    if p.order == 1:
        if work == _SUMS:
            if p.is_planes:
                _planes_sums(tag, p, g, t, slot)
            else:
                _columns_sums(tag, p, g, t, slot)
        elif p.is_planes:
            _planes_apply(tag, p, g, t, slot)
        else:
            _columns_apply(tag, p, g, t, slot)
    elif work == _SUMS:
        if p.is_planes:
            _planes_sums_second(tag, p, g, t, slot)
        else:
            _columns_sums_second(tag, p, g, t, slot)
    elif p.is_planes:
        _planes_apply_second(tag, p, g, t, slot)
    else:
        _columns_apply_second(tag, p, g, t, slot)
