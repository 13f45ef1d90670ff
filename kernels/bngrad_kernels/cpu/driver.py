"""What each thread of a team does: its share of the problems, of a problem's groups, or of the tiles of each group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bngrad_kernels.cpu import channel_stats, plane_sums
from bngrad_kernels.cpu.channel_stats import scratch_of
from bngrad_kernels.cpu.columns import tiles as column_tiles
from bngrad_kernels.cpu.machine_code.hints import fence, out_of_line
from bngrad_kernels.cpu.machine_code.linked import internal
from bngrad_kernels.cpu.plan import RECORD
from bngrad_kernels.cpu.records import APPLY, BEGIN, END, FINISH, GROUPS, PROBLEMS, SUMS
from bngrad_kernels.cpu.second_order import channel_stats as channel_stats_2
from bngrad_kernels.cpu.second_order import column_sums as column_sums_2
from bngrad_kernels.cpu.second_order import plane_sums as plane_sums_2
from bngrad_kernels.cpu.team import (
    begin_phase,
    count,
    number,
    phase_after,
    read,
    record_at,
    take,
    wait_for_change,
    work_of,
)

_PROBLEMS, _GROUPS, _BEGIN, _SUMS, _FINISH, _APPLY, _END = map(
    np.int64, (PROBLEMS, GROUPS, BEGIN, SUMS, FINISH, APPLY, END)
)
_NBYTES = np.int64(RECORD.itemsize)


def _kernel(stats: Any, columns: Any, planes: Any) -> Callable[[Any, Any], None]:  # noqa: PLR0915 - all functions of a kernel
    """Makes the kernel of an order from its modules; it takes the tag of an element type and a `CALL`."""
    begin, finish = stats.begin, stats.finish
    columns_sums, columns_apply = columns.sums, columns.apply
    planes_sums, planes_apply = planes.sums, planes.apply

    @internal
    def run(tag: Any, call: Any) -> None:
        if call.threads == 1:
            for i in range(call.count):
                problem(tag, call, i, np.int64(0))
        else:
            share(tag, call, record_at(call.records), number(call.member))

    @internal
    def problem(tag: Any, call: Any, i: int, slot: int) -> None:
        p = record_at(call.records + i * _NBYTES)
        for g in range(p.groups):
            group(tag, p, g, slot, slot)

    @internal
    def share(tag: Any, call: Any, p: Any, member: int) -> None:
        """Computes problems, or a problem, with all threads, phase by phase.

        A phase has parts, of which each thread takes one after the other: a thread that comes late keeps none waiting.
        Each begins with its own share, which its core's cache may have from the phase before.
        """
        phase = read(call.phase)
        while work_of(phase) != _END:
            parts = parts_of(call, p, work_of(phase))
            for i in range(call.threads):
                thread = (member + i) % call.threads
                first, last = thread * parts // call.threads, (thread + 1) * parts // call.threads
                taken = take(call, thread, phase, last - first)
                while first + taken < last:
                    do(tag, call, p, work_of(phase), member, first, last, taken)
                    if count(call.done) + 1 == parts:
                        begin_phase(call, next_phase(call, p, phase))
                    taken = take(call, thread, phase, last - first)
            phase = wait_for_change(call, phase)

    @internal
    def parts_of(call: Any, p: Any, work: int) -> Any:
        if work == _PROBLEMS:
            return call.count
        if work == _GROUPS:
            return p.groups
        if work in (_SUMS, _APPLY):
            return p.tiles
        return call.threads if work == _FINISH else np.int64(1)

    @internal
    def do(tag: Any, call: Any, p: Any, work: int, member: int, first: int, last: int, taken: int) -> None:
        """Does the next part of a share of which some are taken."""
        slot, g = np.int64(0), call.group
        part = first + taken
        if work == _PROBLEMS:
            problem(tag, call, part, member)
        elif work == _GROUPS:
            group(tag, p, part, member, member)
        elif work == _BEGIN:
            begin(tag, p, g, slot)
        elif work == _SUMS:
            tiles(tag, p, g, part, part + 1, slot, member, work)
        elif work == _APPLY:
            tiles(tag, p, g, last - 1 - taken, last - taken, slot, member, work)
        else:
            repeats = finish(p, g, slot, call.may_repeat, part, call.threads)
            if part == 0:
                call.repeats = repeats

    @internal
    def next_phase(call: Any, p: Any, phase: int) -> int:
        """Returns the phase after one that has ended."""
        work = work_of(phase)
        if work in (_PROBLEMS, _GROUPS):
            return phase_after(phase, _END)
        if work == _FINISH and call.repeats:
            call.may_repeat = np.int64(0)
            return phase_after(phase, _SUMS)
        if work == _FINISH and p.is_training:
            return phase_after(phase, _APPLY)
        if work in (_FINISH, _APPLY):
            call.group += 1
            call.may_repeat = np.int64(1)
            return phase_after(phase, _BEGIN if call.group < p.groups else _END)
        return phase_after(phase, _SUMS if work == _BEGIN else _FINISH)

    @internal
    def group(tag: Any, p: Any, g: int, slot: int, member: int) -> None:
        out_of_line()
        begin(tag, p, g, slot)
        tiles(tag, p, g, np.int64(0), p.tiles, slot, member, _SUMS)
        if finish(p, g, slot, np.int64(1), np.int64(0), np.int64(1)):
            tiles(tag, p, g, np.int64(0), p.tiles, slot, member, _SUMS)
            finish(p, g, slot, np.int64(0), np.int64(0), np.int64(1))
        if p.is_training:
            tiles(tag, p, g, np.int64(0), p.tiles, slot, member, _APPLY)

    @internal
    def tiles(tag: Any, p: Any, g: int, first: int, last: int, slot: int, member: int, work: int) -> None:
        """Sums tiles in order, or writes their outputs in reverse order: what was read last is still in the cache."""
        out_of_line()
        scratch = scratch_of(p, member)
        for i in range(last - first):
            if work == _SUMS:
                if p.is_planes:
                    planes_sums(tag, p, g, first + i, slot)
                else:
                    columns_sums(tag, p, g, first + i, slot, scratch)
            elif p.is_planes:
                planes_apply(tag, p, g, last - 1 - i, slot)
            else:
                columns_apply(tag, p, g, last - 1 - i, slot, scratch)
        if p.streams:
            fence()

    return run


KERNELS = {
    1: _kernel(channel_stats, column_tiles, plane_sums),
    2: _kernel(channel_stats_2, column_sums_2, plane_sums_2),
}
"""By the order of the gradients."""
