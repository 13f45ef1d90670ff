from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import pytest

from bngrad_kernels.problem import Problem
from bngrad_kernels.spec import BFLOAT16, FLOAT16, FLOAT32, Spec
from bngrad_server.arena import ALIGNMENT
from bngrad_server.staging import ARENA, TASK_NBYTES, Place, Sizes, Task, unpack_problem

SPEC = Spec(FLOAT32, (2, 3, 5, 7), 3)
REGION = 5


def arrays_of(problem: Problem) -> list[np.ndarray[Any, Any]]:
    assert problem.scale is not None
    return [
        *(problem.scale, problem.reserve_space_1, problem.reserve_space_2),
        *(problem.scale_backprop, problem.offset_backprop),
        *(problem.y_backprop, problem.x, problem.x_backprop),
    ]


def address(buffer: mmap.mmap) -> int:
    return np.frombuffer(buffer, np.uint8).ctypes.data


@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        Spec(FLOAT16, (1, 1, 1, 1), 3),
        Spec(BFLOAT16, (9, 33), 1, stats_dtype=BFLOAT16),
        Spec(FLOAT32, (0, 3, 5, 7), 3),
        Spec(FLOAT32, (2, 0, 5, 7), 1),
    ],
    ids=str,
)
def test_the_arrays_of_a_block_are_aligned_disjoint_and_where_they_are_said_to_be(spec: Spec) -> None:
    sizes = Sizes.of(spec)
    offset, stride = 3 * ALIGNMENT, sizes.tensor_stride
    tensors = offset + 5 * sizes.stats_stride
    nbytes = 5 * sizes.stats_stride + 3 * stride
    arena = mmap.mmap(-1, offset + nbytes + ALIGNMENT)
    task = Task(True, offset, *(Place(ARENA, tensors + i * stride) for i in range(3)))
    problem = unpack_problem(task.pack(7, range(spec.channels)), {7: spec}, {ARENA: arena})
    assert problem.spec is spec
    offsets = [*(offset + i * sizes.stats_stride for i in range(5)), *(tensors + i * stride for i in range(3))]
    for number, (array, begin) in enumerate(zip(arrays_of(problem), offsets, strict=True), 1):
        is_tensor = number > 5
        assert array.shape == (spec.shape if is_tensor else (spec.channels,))
        assert array.dtype == (spec.dtype if is_tensor else spec.stats_dtype)
        assert array.flags.c_contiguous
        assert begin % ALIGNMENT == 0
        if array.size:
            assert array.ctypes.data == address(arena) + begin
        array.view(np.uint8)[...] = number
    for number, array in enumerate(arrays_of(problem), 1):
        assert (array.view(np.uint8) == number).all()
    assert not any(arena[:offset])
    assert not any(arena[offset + nbytes :])


@pytest.mark.parametrize("index", range(3))
def test_each_tensor_may_lie_in_memory_of_its_own(index: int) -> None:
    arena, region = mmap.mmap(-1, 65536), mmap.mmap(-1, 65536)
    sizes = Sizes.of(SPEC)
    places = [Place(ARENA, 5 * sizes.stats_stride + i * sizes.tensor_stride) for i in range(3)]
    places[index] = Place(REGION, 4096)
    memories = {ARENA: arena, REGION: region, REGION + 1: arena}
    problem = unpack_problem(Task(True, 0, *places).pack(0, range(SPEC.channels)), {0: SPEC}, memories)
    for i, array in enumerate([problem.y_backprop, problem.x, problem.x_backprop]):
        expected = address(region) + 4096 if i == index else address(arena) + places[i].offset
        assert array.ctypes.data == expected


def test_a_packed_task_has_its_own_spec_and_size() -> None:
    specs = {3: SPEC, 2**32 - 1: Spec(BFLOAT16, (4, 6), 1)}
    arena = mmap.mmap(-1, 65536)
    for has_scale in (True, False):
        for number, spec in specs.items():
            packed = Task(has_scale, 0, *[Place(ARENA, 0)] * 3).pack(number, range(SPEC.channels))
            problem = unpack_problem(packed, specs, {ARENA: arena})
            assert (problem.scale is not None, problem.spec) == (has_scale, spec)
            assert len(packed) == TASK_NBYTES
    assert len(Task(True, 2**40, *[Place(2**62, 2**40)] * 3).pack(0, range(2**62, 2**63 - 1))) == TASK_NBYTES
