"""Plans the copies and launches of a chunk: of pieces of problems that are on the device together.

A chunk's device memory is one block. It begins with everything that is uploaded in a single copy: counters,
descriptors, work tiles and the inputs of small pieces, which are first gathered on the host. The outputs of small
pieces are adjacent too. Every large array is copied on its own, directly between the device and the problem's array.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from bngrad_kernels.cuda.descriptors import DESCRIPTOR, KernelVariant, Piece, Template, schedule_tiles, template
from bngrad_kernels.cuda.kernel_selection import KernelKind, Traits
from bngrad_kernels.cuda.plan import cut
from bngrad_kernels.problem import AnyProblem, Array

_ALIGNMENT = 256
GATHER_BELOW_NBYTES = 256 << 10
"""Smaller arrays are gathered into one copy: a separate copy costs as much as copying that many bytes once more."""
_LONG_RUN_NBYTES = 4096
"""Shorter runs are copied slowly: better all of a tensor at once than a part of every row."""
_COUNTER_NBYTES = 4


class Copy(NamedTuple):
    """A copy between rows of bytes on the host and contiguous bytes at an offset on the device.

    Attributes:
        rows: The rows.
        offset: The offset.
        on_device: A copy on the device of the memory that the rows are part of, if there is one.
    """

    rows: Array
    offset: int
    on_device: Any = None

    @property
    def host(self) -> int:
        """The address of the first byte on the host."""
        address: int = self.rows.ctypes.data
        return address


Arrays: TypeAlias = list[tuple[str, Array]]
"""Rows of bytes of arrays, by the names of their pointers in the descriptor."""


class Launch(NamedTuple):
    """A kernel launch. Offsets are in bytes from the start of the chunk's device memory.

    Attributes:
        kernel: The kernel to launch.
        work_tiles: The offset of its work tiles.
        tile_count: How many work tiles there are.
        tile_counter: The offset of the tile scheduler's counter.
        shared_nbytes: The dynamic shared memory of a block.
    """

    kernel: KernelVariant
    work_tiles: int
    tile_count: int
    tile_counter: int
    shared_nbytes: int


class CopyPlan:
    """The layout of a chunk's device memory, with its copies and launches. Offsets are from the start of the memory.

    Attributes:
        descriptors: The offset of the descriptors.
        uploaded: How many bytes, from the start, are uploaded in a single copy; `write_upload` writes them.
        copied_in: The separate copies to the device.
        launches: The launches, in order.
        copied_out: The separate copies from the device.
        downloaded: Offset and size of what is downloaded in a single copy; `read_download` reads it.
        nbytes: The size of the device memory.
    """

    def __init__(self, pieces: Sequence[Piece], traits: Traits) -> None:
        parts = [_part(piece, traits) for piece in pieces]
        self._templates = _in_few_launches(pieces, [part.template for part in parts], traits)
        self._records = np.frombuffer(bytearray(b"".join(each.descriptor for each in self._templates)), DESCRIPTOR)
        # What descriptors point to; 0 stands for null.
        self._offsets: dict[str, list[int]] = collections.defaultdict(lambda: [0] * len(parts))
        self._on_device = [piece.problem.on_device for piece in pieces]
        self.nbytes = 0
        self._place_tables(traits.cache_nbytes)
        self._gathered, large = self._place([part.inputs for part in parts])
        self.uploaded = self.nbytes
        self.copied_in = merged(self._place_alone(large), gap_nbytes=_ALIGNMENT)
        start = self.nbytes
        self._scattered, large = self._place([part.outputs for part in parts])
        self.downloaded = start, self.nbytes - start
        self.copied_out = merged(self._place_alone(large), gap_nbytes=0)  # nothing else may be overwritten
        self._place_scratch()

    def write_upload(self, upload: Array, address: int) -> None:
        """Writes what is uploaded in a single copy; the chunk's device memory starts at ``address``."""
        upload[: self._counters_end] = 0
        records = self._records
        for name, offsets in self._offsets.items():
            records[name] = [offset and address + offset for offset in offsets]
        upload[self.descriptors :][: records.nbytes] = records.view(np.uint8)
        for at, table in self._tables:
            upload[at : at + table.nbytes] = table.reshape(-1).view(np.uint8)
        for rows, offset, _ in self._gathered:
            upload[offset : offset + rows.size].reshape(rows.shape)[...] = rows

    def read_download(self, download: Array) -> None:
        """Writes the outputs of small pieces, from what was downloaded in a single copy."""
        start, _ = self.downloaded
        for rows, offset, _ in self._scattered:
            rows[...] = download[offset - start :][: rows.size].reshape(rows.shape)

    def _take(self, nbytes: int) -> int:
        offset = self.nbytes
        self.nbytes += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return offset

    def _place_tables(self, cache_nbytes: int) -> None:
        kernels = list(dict.fromkeys(each.kernel for each in self._templates))
        groups = [each.groups for each in self._templates]
        # These come first, so that nothing a descriptor points to has offset 0, which stands for null.
        tile_counter = self._take(max(1, len(kernels)) * _COUNTER_NBYTES)
        for name, counts in (("arrived", [each.arrived_counters for each in self._templates]), ("ready", groups)):
            counters = self._take(sum(counts) * _COUNTER_NBYTES)
            before = itertools.accumulate(counts[:-1], initial=0)
            self._offsets[name] = [counters + _COUNTER_NBYTES * each for each in before]
        self._counters_end = self.nbytes
        self.descriptors = self._take(self._records.nbytes)
        self._tables: list[tuple[int, Array]] = []
        self.launches: list[Launch] = []
        for number, kernel in enumerate(kernels):
            indices = [i for i, each in enumerate(self._templates) if each.kernel == kernel]
            table = schedule_tiles([self._templates[i] for i in indices], indices, cache_nbytes)
            at = self._take(table.nbytes)
            self._tables.append((at, table))
            kept = max(self._templates[i].resident_nbytes for i in indices)
            self.launches.append(Launch(kernel, at, len(table), tile_counter + number * _COUNTER_NBYTES, kept))

    def _place(self, arrays: Sequence[Arrays]) -> tuple[list[Copy], list[tuple[int, str, Array]]]:
        """Places small arrays next to each other. Returns their copies, and the large arrays."""
        copies, large = [], []
        for i, own in enumerate(arrays):
            for name, rows in own:
                if rows.size < GATHER_BELOW_NBYTES:
                    copies.append(Copy(rows, self._take(rows.size)))
                    self._offsets[name][i] = copies[-1].offset
                else:
                    large.append((i, name, rows))
        return copies, large

    def _place_alone(self, large: Sequence[tuple[int, str, Array]]) -> list[Copy]:
        copies = []
        for i, name, rows in large:
            copies.append(Copy(rows, self._take(rows.size), self._on_device[i].get(name)))
            self._offsets[name][i] = copies[-1].offset
        return copies

    def _place_scratch(self) -> None:
        for i, each in enumerate(self._templates):
            self._offsets["partials"][i] = self._take(each.partials_nbytes)
            self._offsets["coefficients"][i] = self._take(each.coefficients_nbytes)


def merged(copies: Sequence[Copy], gap_nbytes: int) -> list[Copy]:
    """Merges copies that are as far apart on the host as on the device: each costs some microseconds of the host.

    Args:
        copies: Copies in the order of their offsets.
        gap_nbytes: How many bytes there may be between two arrays; they are copied too.
    """
    result: list[Copy] = []
    roots: list[int] = []
    for copy in copies:
        memory = _root(copy.rows)
        may_merge = len(copy.rows) == 1 and copy.on_device is None
        if result and may_merge and roots[-1] == id(memory):
            last = result[-1]
            distance = copy.offset - last.offset
            if copy.host - last.host == distance and 0 <= distance - last.rows.size <= gap_nbytes:
                start = last.host - np.frombuffer(memory, np.uint8).ctypes.data
                rows = np.frombuffer(memory, np.uint8, distance + copy.rows.size, start)
                result[-1] = Copy(rows.reshape(1, -1), last.offset)
                continue
        result.append(copy)
        roots.append(id(memory) if may_merge else 0)
    return result


def _root(array: Array) -> Any:
    """The memory that an array lies in: a map, or the array that owns it."""
    while isinstance(array, np.ndarray) and array.base is not None:
        array = array.base
    return array


def _in_few_launches(pieces: Sequence[Piece], templates: list[Template], traits: Traits) -> list[Template]:
    """Streams pieces that could be resident if others of their kind must be streamed: one launch is better than two."""
    kernels = {each.kernel for each in templates}
    without = traits._replace(shared_nbytes=0)
    return [
        template(piece, without)
        if each.kernel.kind is KernelKind.RESIDENT and each.kernel._replace(kind=KernelKind.STREAMED) in kernels
        else each
        for piece, each in zip(pieces, templates, strict=True)
    ]


class _Part(NamedTuple):
    """The data of a piece on a device that does not depend on its place in a chunk."""

    traits: Traits
    template: Template
    inputs: Arrays
    outputs: Arrays


def _part(piece: Piece, traits: Traits) -> _Part:
    """Returns the data of a piece, kept with the problem if the piece is all of it."""
    problem = piece.problem
    known = problem.prepared
    is_all = piece.channels == problem.channel_count
    if is_all and isinstance(known, _Part) and known.traits == traits:
        return known
    inputs = _arrays(piece, problem.large_inputs, problem.small_inputs)
    outputs = _arrays(piece, problem.large_outputs, problem.small_outputs)
    made = _Part(traits, template(piece, traits), inputs, outputs)
    if is_all:
        problem.prepared = made
    return made


def _arrays(piece: Piece, large: Sequence[str], small: Sequence[str]) -> Arrays:
    """The bytes of a problem's arrays that belong to a piece; absent arrays are left out."""
    tensors = [(name, _tensor_rows(piece, getattr(piece.problem, name))) for name in large]
    vectors = [(name, getattr(piece.problem, name)) for name in small]
    return tensors + [(name, _stats_row(piece, vector)) for name, vector in vectors if vector is not None]


def _tensor_rows(piece: Piece, tensor: Array) -> Array:
    """A piece's bytes of a tensor: one row per index before the channel axis, or a single row if there are no gaps."""
    spec = piece.problem.spec
    flat = tensor.reshape(-1).view(np.uint8)
    if piece.channels == spec.channels:
        return flat.reshape(1, -1)
    channel_nbytes = spec.inner * spec.dtype.itemsize
    rows = flat.reshape(spec.outer, spec.channels * channel_nbytes)
    return rows[:, piece.first * channel_nbytes : piece.last * channel_nbytes]


def _stats_row(piece: Piece, stats: Array) -> Array:
    return stats[piece.first : piece.last].view(np.uint8).reshape(1, -1)


def split_into_chunks(
    problems: Sequence[AnyProblem], piece_nbytes: int, chunk_nbytes: int, stream_nbytes: int
) -> Iterator[list[Piece]]:
    """Cuts problems into pieces and groups these into chunks.

    Args:
        problems: Problems of any kind.
        piece_nbytes: Larger problems are cut into ranges of channels of about this size, if these form long runs.
        chunk_nbytes: A chunk is closed before it gets larger than this.
        stream_nbytes: Larger problems are cut in any case, if they have several channels.
    """
    chunk: list[Piece] = []
    size = 0
    for problem in problems:
        for piece in _pieces(problem, min(piece_nbytes, stream_nbytes), stream_nbytes):
            nbytes = piece.channels * _channel_nbytes(problem)
            if chunk and size + nbytes > chunk_nbytes:
                yield chunk
                chunk, size = [], 0
            chunk.append(piece)
            size += nbytes
    if chunk:
        yield chunk


def _pieces(problem: AnyProblem, wanted_nbytes: int, most_nbytes: int) -> Iterator[Piece]:
    spec = problem.spec
    step = _channels_in(problem, wanted_nbytes)
    if spec.outer > 1 and step * spec.inner * spec.dtype.itemsize < _LONG_RUN_NBYTES:
        step = _channels_in(problem, most_nbytes)
    channels = range(spec.channels) if problem.channels is None else problem.channels
    for first in channels[::step]:
        yield Piece(problem, first, min(first + step, channels.stop))


def halves(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Cuts a chunk into about two smaller ones; an empty list for a single channel."""
    if len(pieces) > 1:
        return [list(pieces[: len(pieces) // 2]), list(pieces[len(pieces) // 2 :])]
    ((problem, first, last),) = pieces
    if last - first <= 1:
        return []
    width = _in_whole_units(problem, -(-(last - first) // 2))
    return [[Piece(problem, start, min(start + width, last))] for start in range(first, last, width)]


def _channels_in(problem: AnyProblem, nbytes: int) -> int:
    """How many channels fit ``nbytes``, at least one."""
    return _in_whole_units(problem, max(1, nbytes // max(1, _channel_nbytes(problem))))


def _in_whole_units(problem: AnyProblem, channels: int) -> int:
    """As many channels, or fewer: whole groups, or at least whole vectors, if possible."""
    planned = cut(problem.spec)
    unit = next((unit for unit in (planned.group_channels, planned.lanes) if channels >= unit), 1)
    return channels // unit * unit


def _channel_nbytes(problem: AnyProblem) -> int:
    """The device memory of a channel, without descriptors, work tiles and scratch memory."""
    spec = problem.spec
    tensors, vectors = problem.large_inputs + problem.large_outputs, problem.small_inputs + problem.small_outputs
    return len(tensors) * spec.elements_per_channel * spec.dtype.itemsize + len(vectors) * spec.stats_dtype.itemsize
