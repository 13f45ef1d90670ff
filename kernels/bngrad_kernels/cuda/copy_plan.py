"""A chunk: pieces of problems that are on the device together, and how they get there and back.

A chunk's memory on the device is one block. It begins with what is copied there in one go: counters, descriptors,
tickets and the inputs of small pieces, which are gathered first. The outputs of small pieces lie together as well.
Everything else is copied by itself, between the device and where it is.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from bngrad_kernels.cuda.descriptors import DESCRIPTOR, Kernel, Piece, Template, template, tickets
from bngrad_kernels.cuda.kernel_selection import Engine, Traits
from bngrad_kernels.cuda.plan import cut
from bngrad_kernels.problem import AnyProblem, Array

_ALIGNMENT = 256
_GATHER_BELOW_NBYTES = 256 << 10
"""Smaller arrays are gathered into one copy: a copy of its own costs as much as moving that many bytes once more."""
_LONG_RUN_NBYTES = 4096
"""Runs shorter than this are copied slowly: rather all of a tensor at once than a part of every row."""
_COUNTER_NBYTES = 4


class Move(NamedTuple):
    """Bytes of an array, in rows, and their place on the device, without gaps."""

    rows: Array
    offset: int


Arrays: TypeAlias = list[tuple[str, Array]]
"""Bytes of arrays, in rows, by the names of what points to them."""


class Launch(NamedTuple):
    """A launch.

    Attributes:
        kernel: What is launched.
        tickets: Where its table of tickets is.
        length: How many tickets there are.
        drawn: Where the counter of those drawn is.
        shared_nbytes: The shared memory of a block whose size the launch decides.
    """

    kernel: Kernel
    tickets: int
    length: int
    drawn: int
    shared_nbytes: int


class Chunk:
    """Where everything is, in bytes from the start of a chunk's memory on the device.

    Attributes:
        descriptors: Where the descriptors are.
        uploaded: How many bytes, from the start, are copied to the device in one go: what `write_upload` writes.
        copied_in: What is copied to the device by itself.
        launches: What is launched, in this order.
        copied_out: What is copied from the device by itself.
        downloaded: Start and size of what is copied from the device in one go, for `read_download`.
        nbytes: The size of the block.
    """

    def __init__(self, pieces: Sequence[Piece], traits: Traits) -> None:
        parts = [_part(piece, traits) for piece in pieces]
        self._templates = _in_few_launches(pieces, [part.template for part in parts], traits)
        self._records = np.frombuffer(bytearray(b"".join(each.descriptor for each in self._templates)), DESCRIPTOR)
        # Of what descriptors point to; 0 is nothing.
        self._offsets: dict[str, list[int]] = collections.defaultdict(lambda: [0] * len(parts))
        self.nbytes = 0
        self._place_tables(traits.cache_nbytes)
        self._gathered, large = self._place([part.inputs for part in parts])
        self.uploaded = self.nbytes
        self.copied_in = self._place_alone(large)
        start = self.nbytes
        self._scattered, large = self._place([part.outputs for part in parts])
        self.downloaded = start, self.nbytes - start
        self.copied_out = self._place_alone(large)
        self._place_scratch()

    def write_upload(self, upload: Array, address: int) -> None:
        """Writes what is copied to the device in one go.

        Args:
            upload: Where to, at least ``uploaded`` bytes.
            address: Where the chunk's memory on the device starts.
        """
        upload[: self._counters_end] = 0
        records = self._records
        for name, offsets in self._offsets.items():
            records[name] = [offset and address + offset for offset in offsets]
        upload[self.descriptors :][: records.nbytes] = records.view(np.uint8)
        for at, table in self._tables:
            upload[at : at + table.nbytes] = table.reshape(-1).view(np.uint8)
        for rows, offset in self._gathered:
            upload[offset : offset + rows.size].reshape(rows.shape)[...] = rows

    def read_download(self, download: Array) -> None:
        """Writes the outputs of small pieces, from what was copied from the device in one go."""
        start, _ = self.downloaded
        for rows, offset in self._scattered:
            rows[...] = download[offset - start :][: rows.size].reshape(rows.shape)

    def _take(self, nbytes: int) -> int:
        offset = self.nbytes
        self.nbytes += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return offset

    def _place_tables(self, cache_nbytes: int) -> None:
        kernels = list(dict.fromkeys(each.kernel for each in self._templates))
        groups = [each.groups for each in self._templates]
        # Nothing that a descriptor points to is at 0, which stands for nothing.
        drawn = self._take(max(1, len(kernels)) * _COUNTER_NBYTES)
        counters = self._take(2 * sum(groups) * _COUNTER_NBYTES)
        before = list(itertools.accumulate(groups, initial=0))
        self._offsets["arrived"] = [counters + _COUNTER_NBYTES * each for each in before[:-1]]
        self._offsets["ready"] = [counters + _COUNTER_NBYTES * (before[-1] + each) for each in before[:-1]]
        self._counters_end = self.nbytes
        self.descriptors = self._take(self._records.nbytes)
        self._tables: list[tuple[int, Array]] = []
        self.launches: list[Launch] = []
        for number, kernel in enumerate(kernels):
            its = [i for i, each in enumerate(self._templates) if each.kernel == kernel]
            table = tickets([self._templates[i] for i in its], its, cache_nbytes)
            at = self._take(table.nbytes)
            self._tables.append((at, table))
            kept = max(self._templates[i].kept_nbytes for i in its)
            self.launches.append(Launch(kernel, at, len(table), drawn + number * _COUNTER_NBYTES, kept))

    def _place(self, arrays: Sequence[Arrays]) -> tuple[list[Move], list[tuple[int, str, Array]]]:
        """Places what is small, and returns it, and what is large."""
        moves, large = [], []
        for i, its in enumerate(arrays):
            for name, rows in its:
                if rows.size < _GATHER_BELOW_NBYTES:
                    moves.append(Move(rows, self._take(rows.size)))
                    self._offsets[name][i] = moves[-1].offset
                else:
                    large.append((i, name, rows))
        return moves, large

    def _place_alone(self, large: Sequence[tuple[int, str, Array]]) -> list[Move]:
        moves = []
        for i, name, rows in large:
            moves.append(Move(rows, self._take(rows.size)))
            self._offsets[name][i] = moves[-1].offset
        return moves

    def _place_scratch(self) -> None:
        for i, each in enumerate(self._templates):
            self._offsets["partials"][i] = self._take(each.partials_nbytes)
            self._offsets["coefficients"][i] = self._take(each.coefficients_nbytes)


def _in_few_launches(pieces: Sequence[Piece], templates: list[Template], traits: Traits) -> list[Template]:
    """Streams what could be resident where others of its kind have to be streamed: one launch is better than two."""
    kernels = {each.kernel for each in templates}
    without = traits._replace(shared_nbytes=0)
    return [
        template(piece, without)
        if each.kernel.engine is Engine.RESIDENT and each.kernel._replace(engine=Engine.STREAMED) in kernels
        else each
        for piece, each in zip(pieces, templates, strict=True)
    ]


class _Part(NamedTuple):
    """What is known of a piece on a device, wherever it is placed."""

    traits: Traits
    template: Template
    inputs: Arrays
    outputs: Arrays


def _part(piece: Piece, traits: Traits) -> _Part:
    """Looked up where the problem has been here before, as it was then."""
    problem = piece.problem
    known = problem.prepared
    is_all = piece.channels == problem.channel_count
    if is_all and isinstance(known, _Part) and known.traits == traits:
        return known
    made = _Part(traits, template(piece, traits), _inputs(piece), _outputs(piece))
    if is_all:
        problem.prepared = made
    return made


def _inputs(piece: Piece) -> Arrays:
    return _arrays(piece, piece.problem.large_inputs, piece.problem.small_inputs)


def _outputs(piece: Piece) -> Arrays:
    return _arrays(piece, piece.problem.large_outputs, piece.problem.small_outputs)


def _arrays(piece: Piece, large: Sequence[str], small: Sequence[str]) -> Arrays:
    """A piece's bytes of a problem's arrays; one that is not given has none."""
    tensors = [(name, _tensor_rows(piece, getattr(piece.problem, name))) for name in large]
    vectors = [(name, getattr(piece.problem, name)) for name in small]
    return tensors + [(name, _stats_row(piece, vector)) for name, vector in vectors if vector is not None]


def _tensor_rows(piece: Piece, tensor: Array) -> Array:
    """A piece's bytes of a tensor: one row for each index before the channel axis, or one row if it has no gaps."""
    spec = piece.problem.spec
    flat = tensor.reshape(-1).view(np.uint8)
    if piece.channels == spec.channels:
        return flat.reshape(1, -1)
    channel_nbytes = spec.inner * spec.dtype.itemsize
    rows = flat.reshape(spec.outer, spec.channels * channel_nbytes)
    return rows[:, piece.first * channel_nbytes : piece.last * channel_nbytes]


def _stats_row(piece: Piece, stats: Array) -> Array:
    return stats[piece.first : piece.last].view(np.uint8).reshape(1, -1)


def divide(
    problems: Sequence[AnyProblem], piece_nbytes: int, chunk_nbytes: int, lane_nbytes: int
) -> Iterator[list[Piece]]:
    """Shares problems out to chunks.

    Args:
        problems: Of any kind.
        piece_nbytes: Larger problems are cut into ranges of channels of about this size, if these are in long runs.
        chunk_nbytes: A chunk is closed before it gets larger than this.
        lane_nbytes: Larger problems are cut in any case, if they have several channels.
    """
    chunk: list[Piece] = []
    size = 0
    for problem in problems:
        for piece in _pieces(problem, min(piece_nbytes, lane_nbytes), lane_nbytes):
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


def _channels_in(problem: AnyProblem, nbytes: int) -> int:
    """How many channels so many bytes hold, in whole groups or at least in whole vectors where possible."""
    channels = max(1, nbytes // max(1, _channel_nbytes(problem)))
    planned = cut(problem.spec)
    unit = next((unit for unit in (planned.group_channels, planned.lanes) if channels >= unit), 1)
    return channels // unit * unit


def _channel_nbytes(problem: AnyProblem) -> int:
    """What a channel takes on the device, but for the tables."""
    spec = problem.spec
    tensors, vectors = problem.large_inputs + problem.large_outputs, problem.small_inputs + problem.small_outputs
    return len(tensors) * spec.elements_per_channel * spec.dtype.itemsize + len(vectors) * spec.stats_dtype.itemsize
