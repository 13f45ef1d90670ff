from __future__ import annotations

import dataclasses
import mmap
from typing import Any

import numpy as np
import pytest

from bngrad_kernels.problem import AnyProblem, problem_type
from bngrad_kernels.spec import BFLOAT16, FLOAT16, FLOAT32, Spec
from bngrad_server.config import MAX_BATCH_JOBS
from bngrad_server.memory.layout import ALIGNMENT, ARENA, Place, Sizes, Task
from bngrad_server.workers.ipc import MAX_PACKET_NBYTES, Message, pack_task, split_batch, unpack_problem

SPEC = Spec(FLOAT32, (2, 3, 5, 7), 3)
REGION = 5


def arrays_of(problem: AnyProblem) -> list[np.ndarray[Any, Any]]:
    """The 1-D tensors, then the large ones, as they follow each other in a block."""
    names = (*problem.small_inputs, *problem.small_outputs, *problem.large_inputs, *problem.large_outputs)
    return [getattr(problem, name) for name in names]


def counts(spec: Spec) -> tuple[int, int]:
    """How many tensors are 1-D, and how many have the shape of x."""
    problem = problem_type(spec)
    return len(problem.small_inputs + problem.small_outputs), len(problem.large_inputs + problem.large_outputs)


@pytest.mark.parametrize("places", [3, 5])
def test_the_largest_batch_fits_a_packet(places: int) -> None:
    task = pack_task(Task(True, 2**40, (Place(1, 2**40, 1),) * places), 1, range(2**30))
    assert len(Message.RUN + task * MAX_BATCH_JOBS) <= MAX_PACKET_NBYTES


def address(buffer: memoryview) -> int:
    return np.frombuffer(buffer, np.uint8).ctypes.data


@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        Spec(FLOAT16, (1, 1, 1, 1), 3),
        Spec(BFLOAT16, (9, 33), 1, stats_dtype=BFLOAT16),
        Spec(FLOAT32, (0, 3, 5, 7), 3),
        Spec(FLOAT32, (2, 0, 5, 7), 1),
        Spec(FLOAT32, (2, 3, 5, 7), 3, order=2),
        Spec(BFLOAT16, (0, 3, 5, 7), 3, order=2),
    ],
    ids=str,
)
def test_the_arrays_of_a_block_are_aligned_disjoint_and_where_they_are_said_to_be(spec: Spec) -> None:
    sizes = Sizes.of(spec)
    offset, stride = 3 * ALIGNMENT, sizes.tensor_stride
    small, large = counts(spec)
    tensors = offset + small * sizes.stats_stride
    nbytes = small * sizes.stats_stride + large * stride
    assert sizes.all_stats == small * sizes.stats_stride
    arena = memoryview(mmap.mmap(-1, offset + nbytes + ALIGNMENT))
    task = Task(True, offset, tuple(Place(ARENA, tensors + i * stride) for i in range(large)))
    problem = unpack_problem(pack_task(task, 7, range(spec.channels)), {7: spec}, {ARENA: arena})
    assert problem.spec is spec
    assert type(problem) is problem_type(spec)
    offsets = [*(offset + i * sizes.stats_stride for i in range(small)), *(tensors + i * stride for i in range(large))]
    for number, (array, begin) in enumerate(zip(arrays_of(problem), offsets, strict=True), 1):
        is_tensor = number > small
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


@pytest.mark.parametrize(("order", "index"), [*((1, i) for i in range(3)), *((2, i) for i in range(5))])
def test_each_tensor_may_lie_in_memory_of_its_own(order: int, index: int) -> None:
    arena, region = memoryview(mmap.mmap(-1, 65536)), memoryview(mmap.mmap(-1, 65536))
    spec = dataclasses.replace(SPEC, order=order)
    sizes = Sizes.of(spec)
    small, large = counts(spec)
    places = [Place(ARENA, sizes.all_stats + i * sizes.tensor_stride) for i in range(large)]
    places[index] = Place(REGION, 4096)
    memories = {ARENA: arena, REGION: region, REGION + 1: arena}
    problem = unpack_problem(pack_task(Task(True, 0, tuple(places)), 0, range(spec.channels)), {0: spec}, memories)
    for i, array in enumerate(arrays_of(problem)[small:]):
        expected = address(region) + 4096 if i == index else address(arena) + places[i].offset
        assert array.ctypes.data == expected


@pytest.mark.parametrize("order", [1, 2])
def test_a_batch_is_split_into_its_tasks_each_with_its_own_spec(order: int) -> None:
    specs = {3: SPEC, 2**32 - 1: Spec(BFLOAT16, (4, 6), 1)}
    specs = {number: dataclasses.replace(spec, order=order) for number, spec in specs.items()}
    arena = memoryview(mmap.mmap(-1, 65536))
    places = (Place(ARENA, 0),) * counts(specs[3])[1]
    kinds = [(has_scale, number) for has_scale in (True, False) for number in specs]
    batch = [pack_task(Task(has_scale, 0, places), index, range(specs[index].channels)) for has_scale, index in kinds]
    assert split_batch(memoryview(b"".join(batch)), specs) == batch
    for packed, (has_scale, number) in zip(batch, kinds, strict=True):
        problem = unpack_problem(packed, specs, {ARENA: arena})
        assert (problem.scale is not None, problem.spec) == (has_scale, specs[number])
    largest = pack_task(Task(True, 2**40, (Place(2**62, 2**40),) * len(places)), 3, range(2**62, 2**63 - 1))
    assert len(largest) == len(batch[0])
