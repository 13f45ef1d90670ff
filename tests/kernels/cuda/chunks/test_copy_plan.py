from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.kernels.problems import DTYPES, MODES, ORDERS, bits, clear_outputs, random_problem, spec_of

from bngrad_kernels.cuda.chunks.copy_plan import Copy, CopyPlan, merged
from bngrad_kernels.cuda.chunks.layout import LayoutCache
from bngrad_kernels.cuda.descriptors import Piece
from bngrad_kernels.cuda.kernel_selection import Traits
from bngrad_kernels.problem import Array

TRAITS = Traits(processors=132, shared_nbytes=227 << 10, cache_nbytes=50 << 20)
SHAPES = [(4, 8), (0, 4), (3, 16, 5), (2, 5, 0), (1, 5, 1), (7, 9, 1), (64, 32, 200), (300, 70, 4)]
"""Of small tensors, empty ones and large ones."""


@st.composite
def piece_makers(draw: st.DrawFn) -> Callable[[int], Piece]:
    """A function that makes a piece of a new problem, of the same spec and channels each time, from a seed."""
    shape, order = draw(st.sampled_from(SHAPES)), draw(st.sampled_from(ORDERS))
    spec = spec_of(order, shape, draw(st.sampled_from(DTYPES)), is_training=draw(st.sampled_from(MODES)))
    has_scale, is_whole = draw(st.booleans()), draw(st.booleans())
    first = 0 if is_whole else draw(st.integers(0, shape[1] - 1))
    last = shape[1] if is_whole else draw(st.integers(first + 1, shape[1]))
    return lambda seed: Piece(random_problem(spec, seed, has_scale=has_scale), first, last)


def described(copies: list[Copy]) -> list[tuple[Any, ...]]:
    return [(copy.host, copy.rows.shape, copy.rows.strides, copy.offset, copy.on_device) for copy in copies]


def uploaded(plan: CopyPlan, address: int) -> bytes:
    upload = np.zeros(plan.layout.uploaded, np.uint8)
    plan.write_upload(upload, address)
    return upload.tobytes()


def downloaded(plan: CopyPlan, pieces: list[Piece]) -> list[list[bytes]]:
    """The outputs after a download of random bytes."""
    for piece in pieces:
        clear_outputs(piece.problem)
    plan.read_download(np.random.default_rng(0).integers(0, 256, plan.layout.downloaded_nbytes, np.uint8))
    return [bits(piece.problem) for piece in pieces]


def assert_same(plan: CopyPlan, other: CopyPlan, pieces: list[Piece]) -> None:
    """Asserts that two plans of the same pieces do the same."""
    assert plan.layout.launches == other.layout.launches
    assert plan.layout.nbytes == other.layout.nbytes
    assert plan.layout.descriptors == other.layout.descriptors
    assert plan.layout.downloaded == other.layout.downloaded
    assert described(plan.copied_in) == described(other.copied_in)
    assert described(plan.copied_out) == described(other.copied_out)
    for address in (256, 0x7F12_3456_7800, 3 << 62):
        assert uploaded(plan, address) == uploaded(other, address)
    assert downloaded(plan, pieces) == downloaded(other, pieces)


@given(st.lists(piece_makers(), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_a_plan_with_a_layout_from_the_cache_does_the_same_as_one_with_a_new_layout(
    makers: list[Callable[[int], Piece]], random: Any
) -> None:
    cache = LayoutCache()
    earlier = CopyPlan([make(0) for make in makers], TRAITS, cache)
    random.shuffle(makers)
    pieces = [make(1) for make in makers]
    for i, piece in enumerate(pieces):
        piece.problem.on_device = {"x": f"copy {i}"} if random.random() < 0.3 else {}
    for _ in range(2):  # with problems that have kept nothing, then with the same once more
        plan = CopyPlan(pieces, TRAITS, cache)
        assert plan.layout is earlier.layout
        assert_same(plan, CopyPlan(pieces, TRAITS, LayoutCache()), pieces)


def test_what_was_copied_ahead_is_looked_up_in_each_run() -> None:
    piece = Piece(random_problem(spec_of(1, (64, 32, 200))), 0, 32)
    cache = LayoutCache()
    for copies in ({}, {"x": "first"}, {"x": "second", "y_backprop": "third"}, {}):
        piece.problem.on_device = copies
        plan = CopyPlan([piece], TRAITS, cache)
        assert [copy.on_device for copy in plan.copied_in] == [copies.get("y_backprop"), copies.get("x")]


def test_gathered_inputs_are_where_the_descriptors_point_to() -> None:
    pieces = [Piece(random_problem(spec_of(1, (4, 6 + i), DTYPES[i])), i, 5 + i) for i in range(3)]
    plan = CopyPlan(pieces, TRAITS, LayoutCache())
    upload = np.frombuffer(uploaded(plan, 256), np.uint8)
    expected = [
        np.ascontiguousarray(getattr(piece.problem, name)[..., piece.first : piece.last]).tobytes()
        for piece in pieces
        for name in ("y_backprop", "x", "scale", "reserve_space_1", "reserve_space_2")
    ]
    assert sorted(upload[place].tobytes() for place in plan.layout.small_inputs) == sorted(expected)


def test_copies_of_neighbours_are_merged_and_others_are_not() -> None:
    memory = np.frombuffer(mmap.mmap(-1, 1 << 16), np.uint8)
    other = np.zeros(1 << 10, np.uint8)

    def copy(array: Array, start: int, nbytes: int, offset: int) -> Copy:
        return Copy.of_bytes(array[start : start + nbytes], offset)

    def ranges(copies: list[Copy]) -> list[tuple[int, int]]:
        return [(each.offset, each.rows.size) for each in copies]

    near = [copy(memory, 0, 1000, 512), copy(memory, 1024, 700, 1536)]
    assert ranges(merged(near, gap_nbytes=256)) == [(512, 1724)]
    assert merged(near, gap_nbytes=256)[0].host == near[0].host
    assert ranges(merged(near, gap_nbytes=0)) == [(512, 1000), (1536, 700)]
    far = [copy(memory, 0, 1000, 512), copy(memory, 2048, 700, 1536), copy(other, 0, 700, 2560)]
    assert ranges(merged(far, gap_nbytes=256)) == ranges(far)
