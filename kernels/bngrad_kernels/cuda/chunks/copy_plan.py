"""Plans the copies of a chunk: small arrays are gathered into one copy, large ones are copied on their own.

Every large array is copied directly between the device and the problem's array.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from bngrad_kernels.cuda.chunks.layout import ALIGNMENT, LayoutCache
from bngrad_kernels.cuda.chunks.prepared import LargeRows, prepare
from bngrad_kernels.cuda.descriptors import Piece
from bngrad_kernels.cuda.kernel_selection import Traits
from bngrad_kernels.problem import Array, address_of_array


class Copy(NamedTuple):
    """A copy between rows of bytes on the host and contiguous bytes at an offset on the device.

    Attributes:
        rows: The rows.
        host: The address of the first byte on the host.
        offset: The offset.
        on_device: A copy on the device of the memory that the rows are part of, if there is one.
    """

    rows: Array
    host: int
    offset: int
    on_device: Any = None

    @classmethod
    def of_bytes(cls, array: Array, offset: int) -> Copy:
        """The copy of contiguous bytes."""
        return cls(array.reshape(1, -1), address_of_array(array), offset)


class CopyPlan:
    """The copies and launches of a chunk. Offsets are from the start of its device memory.

    Attributes:
        layout: The layout of the memory, with the launches.
        copied_in: The separate copies to the device.
        copied_out: The separate copies from the device.
    """

    def __init__(self, pieces: Sequence[Piece], traits: Traits, layouts: LayoutCache) -> None:
        """Plans pieces, at least one, for a device with these traits."""
        prepared = [(prepare(piece, traits), piece.problem.on_device) for piece in pieces]
        prepared.sort(key=lambda each: each[0].footprint.number)  # the same pieces in any order have one layout
        layout = self.layout = layouts.layout(tuple([each.footprint for each, _ in prepared]))
        self._small_inputs = [rows for each, _ in prepared for rows in each.small_inputs]
        self._small_outputs = [rows for each, _ in prepared for rows in each.small_outputs]
        inputs = [(large, on_device) for each, on_device in prepared for large in each.large_inputs]
        outputs = [(large, on_device) for each, on_device in prepared for large in each.large_outputs]
        self.copied_in = merged(_copies(inputs, layout.large_inputs), gap_nbytes=ALIGNMENT)
        self.copied_out = merged(_copies(outputs, layout.large_outputs), gap_nbytes=0)  # nothing else is overwritten

    def write_upload(self, upload: Array, address: int) -> None:
        """Writes what is uploaded in a single copy; the chunk's device memory starts at ``address``."""
        self.layout.write_tables(upload, address)
        memory = upload.data
        for place, rows in zip(self.layout.small_inputs, self._small_inputs, strict=True):
            if isinstance(rows, memoryview):
                memory[place] = rows
            else:
                upload[place].reshape(rows.shape)[...] = rows

    def read_download(self, download: Array) -> None:
        """Writes the outputs of small pieces, from what was downloaded in a single copy."""
        memory = download.data
        for place, rows in zip(self.layout.small_outputs, self._small_outputs, strict=True):
            if isinstance(rows, memoryview):
                rows[:] = memory[place]
            else:
                rows[...] = download[place].reshape(rows.shape)


def _copies(arrays: Iterable[tuple[LargeRows, dict[str, Any]]], offsets: Iterable[int]) -> list[Copy]:
    """The copies of large arrays, each given with the copies ahead of its problem."""
    return [
        Copy(large.rows, large.host, offset, on_device.get(large.name))
        for (large, on_device), offset in zip(arrays, offsets, strict=True)
    ]


def merged(copies: Sequence[Copy], gap_nbytes: int) -> list[Copy]:
    """Merges copies that are as far apart on the host as on the device: each costs some microseconds of the host.

    Args:
        copies: Copies in the order of their offsets.
        gap_nbytes: How many bytes there may be between two arrays; they are copied too.
    """
    result: list[Copy] = []
    for copy in copies:
        last = result[-1] if result else copy
        distance = copy.offset - last.offset
        is_near = result and copy.host - last.host == distance and 0 <= distance - last.rows.size <= gap_nbytes
        if is_near and _is_mergeable(last) and _is_mergeable(copy) and _root(last.rows) is _root(copy.rows):
            memory = np.frombuffer(_root(copy.rows), np.uint8)
            start = last.host - address_of_array(memory)
            result[-1] = Copy.of_bytes(memory[start : start + distance + copy.rows.size], last.offset)
        else:
            result.append(copy)
    return result


def _is_mergeable(copy: Copy) -> bool:
    return len(copy.rows) == 1 and copy.on_device is None


def _root(array: Array) -> Any:
    """The memory that an array lies in: a map, or the array that owns it."""
    while isinstance(array, np.ndarray) and array.base is not None:
        array = array.base
    return array
