from __future__ import annotations

import numpy as np
import pytest
from tests.kernels.problems import first_order_problem

from bngrad_kernels.cuda.chunks.cutting import halves, split_into_chunks
from bngrad_kernels.cuda.chunks.prepared import prepare
from bngrad_kernels.cuda.descriptors import Piece
from bngrad_kernels.cuda.kernel_selection import Traits
from bngrad_kernels.problem import Problem
from bngrad_kernels.spec import FLOAT32, Spec

TRAITS = Traits(processors=132, shared_nbytes=227 << 10, cache_nbytes=50 << 20)


def ranges_of(spec: Spec, piece_nbytes: int, stream_nbytes: int) -> list[tuple[int, int]]:
    tensor, stats = np.empty(spec.shape, spec.dtype), np.empty(spec.channels, np.float32)
    whole = Problem.allocate(spec, tensor, tensor, None, stats, stats)
    chunks = split_into_chunks([whole], piece_nbytes, 1 << 40, stream_nbytes)
    return [(piece.first, piece.last) for chunk in chunks for piece in chunk]


@pytest.mark.parametrize(
    ("shape", "stream_nbytes", "width"),
    [
        ((1000, 256), 1 << 30, 256),  # as it is
        ((1000, 256), 100 * 12_020, 64),  # whole groups of 64 channels
        ((1000, 256), 11 * 12_020, 8),  # whole vectors of 4
        ((1000, 256), 3 * 12_020, 3),
        ((1000, 256), 1, 1),  # a channel at least
    ],
)
def test_what_does_not_fit_a_stream_is_cut_into_ranges_of_channels(
    shape: tuple[int, int], stream_nbytes: int, width: int
) -> None:
    expected = [(first, min(first + width, 256)) for first in range(0, 256, width)]
    assert ranges_of(Spec(FLOAT32, shape, 1), 1 << 30, stream_nbytes) == expected


@pytest.mark.parametrize(
    ("shape", "widths"),
    [
        ((40, 256), [256]),  # rows of a few bytes would be slow to copy
        ((40, 16, 4000), [2] * 8),
        ((1, 16, 40_000), [8, 8]),
        ((40, 16, 40), [16]),
    ],
    ids=str,
)
def test_what_is_large_is_cut_for_the_streams_to_overlap_if_that_leaves_long_runs(
    shape: tuple[int, ...], widths: list[int]
) -> None:
    ranges = ranges_of(Spec(FLOAT32, shape, 1), 4_000_000, 1 << 30)
    assert [last - first for first, last in ranges] == widths


def test_chunks_are_closed_before_they_get_too_large() -> None:
    batch = [first_order_problem(Spec(FLOAT32, (10, 10), 1)) for _ in range(10)]  # 1400 bytes each
    chunks = list(split_into_chunks(batch, 1 << 20, 4300, 1 << 20))
    assert [len(chunk) for chunk in chunks] == [3, 3, 3, 1]
    assert [piece.problem for chunk in chunks for piece in chunk] == batch


def test_a_chunk_is_cut_between_problems_then_between_channels() -> None:
    problem = first_order_problem(Spec(FLOAT32, (100, 96), 1))
    pieces = [Piece(problem, 0, 96)] * 3
    assert [len(part) for part in halves(pieces)] == [1, 2]
    assert [(piece.first, piece.last) for (piece,) in halves([pieces[0]])] == [(0, 48), (48, 96)]
    assert halves([Piece(problem, 5, 6)]) == []


def test_a_problem_that_was_prepared_before_is_cut_in_the_same_way() -> None:
    batch = [first_order_problem(Spec(FLOAT32, (10, size), 1)) for size in (10, 30, 7, 100, 1)]
    batch[1].channels = range(3, 21)

    def ranges() -> list[list[tuple[int, int]]]:
        chunks = split_into_chunks(batch, 5000, 3000, 5000)
        return [[(piece.first, piece.last) for piece in chunk] for chunk in chunks]

    before = ranges()
    for chunk in split_into_chunks(batch, 5000, 3000, 5000):
        for piece in chunk:
            prepare(piece, TRAITS)
    assert sum(problem.prepared is not None for problem in batch) == 4
    assert ranges() == before


def test_a_problem_that_fits_is_not_cut_although_its_channels_are_no_whole_groups() -> None:
    made = first_order_problem(Spec(FLOAT32, (1000, 250), 1))  # 12,020 bytes for each channel
    (chunk,) = split_into_chunks([made], 251 * 12_020, 1 << 30, 1 << 30)
    assert chunk == [Piece(made, 0, 250)]
