"""The bits that every backend computes: they depend on a problem's inputs alone, not on batch, parts or alignment."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from tests.kernels.backends import CPU_SHAPES, CUDA_SHAPES, each, on_backends
from tests.kernels.problems import (
    DTYPES,
    MODES,
    ORDERS,
    bits,
    bits_of_channels,
    clear_outputs,
    input_names,
    output_names,
    outputs,
    random_problem,
    second_order_problem,
    spec_of,
)

from bngrad_kernels.backend import Backend
from bngrad_kernels.problem import Array


@pytest.mark.parametrize(
    ("backend", "shapes"), on_backends(cpu=[("CPU_SHAPES",)], cuda=[("CUDA_SHAPES",)]), indirect=["backend"]
)
def test_the_bits_do_not_depend_on_what_is_in_the_batch(backend: Backend, shapes: str) -> None:
    shapes_of = {"CPU_SHAPES": {1: CPU_SHAPES, 2: CPU_SHAPES}, "CUDA_SHAPES": CUDA_SHAPES}[shapes]
    specs = {order: [spec_of(order, *case, is_training=mode) for *case, mode in each(shapes_of[order], DTYPES, MODES)]
             for order in ORDERS}  # fmt: skip
    mixed = [spec for pair in itertools.zip_longest(*specs.values()) for spec in pair if spec is not None]
    batch = [random_problem(spec) for spec in mixed]
    backend.run(batch)
    for spec, batched in zip(mixed, batch, strict=True):
        alone = random_problem(spec)
        backend.run([alone])
        assert bits(alone) == bits(batched), spec


@pytest.mark.parametrize(
    ("backend", "order", "shape"),
    on_backends(each(ORDERS, [(40, 70, 1), (40, 72, 1), (6, 30, 49), (4, 9, 700), (0, 9, 4)])),
    indirect=["backend"],
)
def test_a_part_of_the_channels_has_the_bits_of_the_whole_and_leaves_the_others_alone(
    backend: Backend, order: int, shape: tuple[int, ...]
) -> None:
    whole, untouched, part = (random_problem(spec_of(order, shape)) for _ in range(3))
    backend.run([whole])
    part.channels = range(2, 7)
    backend.run([part])
    others = np.setdiff1d(np.arange(shape[1]), part.channels)
    for expected, got, before in zip(outputs(whole), outputs(part), outputs(untouched), strict=True):
        assert bits_of_channels(got, part.channels) == bits_of_channels(expected, part.channels)
        assert bits_of_channels(got, others) == bits_of_channels(before, others)
    part.channels, part.prepared = range(0), None
    backend.run([part])


@pytest.mark.parametrize("ignored", [np.nan, 1e30])
@pytest.mark.parametrize(
    ("backend", "shape"), on_backends(zip([(40, 70, 1), (40, 5, 9), (40, 5, 600)], strict=True)), indirect=["backend"]
)
def test_the_second_order_ignores_the_reserves_in_training(
    backend: Backend, shape: tuple[int, ...], ignored: float
) -> None:
    problem, other = second_order_problem(spec_of(2, shape)), second_order_problem(spec_of(2, shape))
    other.reserve_space_1.fill(ignored)
    other.reserve_space_2.fill(ignored)
    backend.run([problem, other])
    assert bits(problem) == bits(other)


@pytest.mark.parametrize("is_training", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("backend", "order", "shape", "start"),
    on_backends(
        cpu=each(ORDERS, [(40, 70, 1), (33, 64, 1), (7, 5, 9), (3, 5, 300)], [64, 65, 71]),
        cuda=each(ORDERS, [(33, 7, 9), (33, 64, 1)], [63]),
    ),
    indirect=["backend"],
)
def test_arrays_may_be_unaligned_and_nothing_beside_the_outputs_is_written(
    backend: Backend, order: int, shape: tuple[int, ...], start: int, dtype: Any, is_training: bool
) -> None:
    problem = random_problem(spec_of(order, shape, dtype, is_training=is_training))
    backend.run([problem])

    def placed(array: Array) -> tuple[Array, Array]:
        """A copy of an array, ``start`` bytes into other memory; and that memory."""
        memory = np.full(array.nbytes + 256, 0xAB, np.uint8)
        inside = memory[start:][: array.nbytes].view(array.dtype).reshape(array.shape)
        inside[...] = array
        return inside, memory

    places = {name: placed(getattr(problem, name)) for name in (*input_names(problem), *output_names(problem))}
    arrays: dict[str, Any] = {name: inside for name, (inside, _) in places.items()}
    moved = dataclasses.replace(problem, prepared=None, **arrays)
    clear_outputs(moved)
    backend.run([moved])
    assert bits(moved) == bits(problem)
    for inside, memory in places.values():
        assert (memory[:start] == 0xAB).all()
        assert (memory[start + inside.nbytes :] == 0xAB).all()
