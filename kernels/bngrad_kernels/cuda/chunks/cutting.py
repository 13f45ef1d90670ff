"""Cuts problems into pieces, and groups these into chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bngrad_kernels.cuda.chunks.prepared import channel_nbytes, device_nbytes
from bngrad_kernels.cuda.descriptors import Piece
from bngrad_kernels.cuda.plan import cut
from bngrad_kernels.problem import AnyProblem

_LONG_RUN_NBYTES = 4096
"""Shorter runs are copied slowly: better all of a tensor at once than a part of every row."""


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
        for piece, nbytes in _pieces(problem, min(piece_nbytes, stream_nbytes), stream_nbytes):
            if chunk and size + nbytes > chunk_nbytes:
                yield chunk
                chunk, size = [], 0
            chunk.append(piece)
            size += nbytes
    if chunk:
        yield chunk


def _pieces(problem: AnyProblem, wanted_nbytes: int, most_nbytes: int) -> list[tuple[Piece, int]]:
    """A problem's pieces, with their device memory."""
    spec = problem.spec
    first, last = (0, spec.channels) if problem.channels is None else (problem.channels.start, problem.channels.stop)
    nbytes = device_nbytes(problem)
    if first < last and nbytes <= wanted_nbytes:
        return [(Piece(problem, first, last), nbytes)]
    step = _channels_in(problem, wanted_nbytes)
    if spec.outer > 1 and step * spec.inner * spec.dtype.itemsize < _LONG_RUN_NBYTES:
        step = _channels_in(problem, most_nbytes)
    pieces = [Piece(problem, start, min(start + step, last)) for start in range(first, last, step)]
    return [(piece, piece.channels * channel_nbytes(problem)) for piece in pieces]


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
    return _in_whole_units(problem, max(1, nbytes // max(1, channel_nbytes(problem))))


def _in_whole_units(problem: AnyProblem, channels: int) -> int:
    """As many channels, or fewer: whole groups, or at least whole vectors, if possible."""
    planned = cut(problem.spec)
    unit = next((unit for unit in (planned.group_channels, planned.lanes) if channels >= unit), 1)
    return channels // unit * unit
