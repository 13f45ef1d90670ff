"""What each thread of a team does: its share of the problems, of a problem's groups, or of the tiles of each group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

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


class Entries(NamedTuple):
    """The functions of a kernel that are called from outside; they take the tag of an element type and a `CALL`.

    Attributes:
        alone: Computes all problems in the calling thread.
        join: Computes them as a member of a team, whose number it takes, and the kernel's address.
    """

    alone: Callable[[Any, Any], None]
    join: Callable[[Any, Any, int, int], None]


def _kernel(stats: Any, columns: Any, planes: Any) -> Entries:  # noqa: PLR0915 - all functions of a kernel
    """Makes the kernel of an order from its modules."""
    begin, finish = stats.begin, stats.finish
    columns_sums, columns_apply = columns.sums, columns.apply
    planes_sums, planes_apply = planes.sums, planes.apply

    @internal
    def alone(tag: Any, call: Any) -> None:
        for i in range(call.count):
            problem(tag, call, i, np.int64(0))

    @internal
    def join(tag: Any, call: Any, member: int, kernel: int) -> None:
        """Computes problems, or a problem, with all threads, phase by phase; the first member begins."""
        if member == 0:
            parts = parts_of(call, record_at(call.records), call.work)
            begin_phase(call, phase_after(read(call.phase), call.work), parts, member)
        phase = read(call.phase)
        while work_of(phase) != _END and call.kernel == kernel and member < call.threads:
            share(tag, call, member, phase)
            phase = wait_for_change(call, phase, member)

    @internal
    def share(tag: Any, call: Any, member: int, phase: int) -> None:
        """Takes parts of a phase until none is left.

        Begins with this thread's own share, which its core's cache may have from the phase before.
        """
        threads, parts = call.threads, read(call.parts)
        for i in range(threads):
            thread = (member + i) % threads
            first, last = thread * parts // threads, (thread + 1) * parts // threads
            taken = take(call, thread, phase, last - first)
            while first + taken < last:
                p = record_at(call.records)
                do(tag, call, p, work_of(phase), member, first, last, taken)
                if count(call.done) + 1 == parts:
                    work = next_work(call, p, work_of(phase))
                    begin_phase(call, phase_after(phase, work), parts_of(call, p, work), member)
                taken = take(call, thread, phase, last - first)

    @internal
    def problem(tag: Any, call: Any, i: int, slot: int) -> None:
        p = record_at(call.records + i * _NBYTES)
        for g in range(p.groups):
            group(tag, p, g, slot, slot)

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
    def next_work(call: Any, p: Any, work: int) -> Any:
        """Returns what is done after some work."""
        if work in (_PROBLEMS, _GROUPS):
            return _END
        if work == _FINISH and call.repeats:
            call.may_repeat = np.int64(0)
            return _SUMS
        if work == _FINISH and p.is_training:
            return _APPLY
        if work in (_FINISH, _APPLY):
            call.group += 1
            call.may_repeat = np.int64(1)
            return _BEGIN if call.group < p.groups else _END
        return _SUMS if work == _BEGIN else _FINISH

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

    return Entries(alone, join)


KERNELS = {
    1: _kernel(channel_stats, column_tiles, plane_sums),
    2: _kernel(channel_stats_2, column_sums_2, plane_sums_2),
}
"""By the order of the gradients."""
