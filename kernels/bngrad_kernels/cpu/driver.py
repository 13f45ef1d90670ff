"""What each thread of a team does: its share of the problems, of a problem's groups, or of the tiles of each group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bngrad_kernels.cpu import channel_stats, column_sums, plane_sums
from bngrad_kernels.cpu.machine_code.linked import internal
from bngrad_kernels.cpu.plan import RECORD
from bngrad_kernels.cpu.second_order import channel_stats as channel_stats_2
from bngrad_kernels.cpu.second_order import column_sums as column_sums_2
from bngrad_kernels.cpu.second_order import plane_sums as plane_sums_2
from bngrad_kernels.cpu.simd import fence, out_of_line
from bngrad_kernels.cpu.team import number, record_at, wait

_SUMS, _APPLY = np.int64(0), np.int64(1)
_NBYTES = np.int64(RECORD.itemsize)


def _kernel(stats: Any, columns: Any, planes: Any) -> Callable[[Any, Any], None]:  # noqa: PLR0915 - all functions of a kernel
    """Makes the kernel of an order from its modules; it takes the tag of an element type and a `CALL`."""
    begin, finish = stats.begin, stats.finish
    columns_sums, columns_apply = columns.sums, columns.apply
    planes_sums, planes_apply = planes.sums, planes.apply

    @internal
    def run(tag: Any, call: Any) -> None:
        p = record_at(call.records)
        member, members = number(call.member), number(call.members)
        # The team may have fewer members than it should: each does the shares of several threads.
        thread = member
        while thread < call.threads:
            if call.one_by_one:
                problems(tag, call, thread)
            elif p.by_group:
                for g in range(thread * p.groups // call.threads, (thread + 1) * p.groups // call.threads):
                    group(tag, p, g, thread)
            thread += members
        if not (call.one_by_one or p.by_group):
            for g in range(p.groups):
                split(tag, call, p, g, member, members)

    @internal
    def problems(tag: Any, call: Any, thread: int) -> None:
        i = thread
        while i < call.count:
            p = record_at(call.records + i * _NBYTES)
            for g in range(p.groups):
                group(tag, p, g, np.int64(0))
            i += call.threads

    @internal
    def split(tag: Any, call: Any, p: Any, g: int, member: int, members: int) -> None:
        """Computes a group with the whole team, whose first member does what is to be done once."""
        if member == 0:
            begin(tag, p, g, np.int64(0))
        may_repeat = np.int64(1)
        again = True
        while again:
            wait(call.barrier)
            shares(tag, call, p, g, _SUMS, member, members)
            wait(call.barrier)
            finish_shares(call, p, g, may_repeat, member, members)
            wait(call.barrier)
            again, may_repeat = call.again != 0, np.int64(0)
        if p.is_training:
            shares(tag, call, p, g, _APPLY, member, members)
        wait(call.barrier)

    @internal
    def finish_shares(call: Any, p: Any, g: int, may_repeat: int, member: int, members: int) -> None:
        thread = member
        while thread < call.threads:
            repeats = finish(p, g, np.int64(0), may_repeat, thread, call.threads)
            if thread == 0:
                call.again = repeats
            thread += members

    @internal
    def shares(tag: Any, call: Any, p: Any, g: int, work: int, member: int, members: int) -> None:
        thread = member
        while thread < call.threads:
            first, last = thread * p.tiles // call.threads, (thread + 1) * p.tiles // call.threads
            tiles(tag, p, g, first, last, np.int64(0), work)
            thread += members

    @internal
    def group(tag: Any, p: Any, g: int, slot: int) -> None:
        out_of_line()
        begin(tag, p, g, slot)
        tiles(tag, p, g, np.int64(0), p.tiles, slot, _SUMS)
        if finish(p, g, slot, np.int64(1), np.int64(0), np.int64(1)):
            tiles(tag, p, g, np.int64(0), p.tiles, slot, _SUMS)
            finish(p, g, slot, np.int64(0), np.int64(0), np.int64(1))
        if p.is_training:
            tiles(tag, p, g, np.int64(0), p.tiles, slot, _APPLY)

    @internal
    def tiles(tag: Any, p: Any, g: int, first: int, last: int, slot: int, work: int) -> None:
        """Sums tiles in order, or writes their outputs in reverse order: what was read last is still in the cache."""
        out_of_line()
        for i in range(last - first):
            if work == _SUMS:
                if p.is_planes:
                    planes_sums(tag, p, g, first + i, slot)
                else:
                    columns_sums(tag, p, g, first + i, slot)
            elif p.is_planes:
                planes_apply(tag, p, g, last - 1 - i, slot)
            else:
                columns_apply(tag, p, g, last - 1 - i, slot)
        if p.streams:
            fence()

    return run


KERNELS = {
    1: _kernel(channel_stats, column_sums, plane_sums),
    2: _kernel(channel_stats_2, column_sums_2, plane_sums_2),
}
"""By the order of the gradients."""
