from __future__ import annotations

import gc
import weakref

import pytest
from tests.kernels.cuda.devices import cuda_backend
from tests.kernels.problems import ORDERS, first_order_problem, random_problem, spec_of

from bngrad_kernels.cuda.chunks.prepared import device_nbytes, prepare
from bngrad_kernels.cuda.descriptors import Piece
from bngrad_kernels.cuda.kernel_selection import Traits

TRAITS = Traits(processors=132, shared_nbytes=227 << 10, cache_nbytes=50 << 20)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", [(4, 8), (64, 32, 200)], ids=str)
def test_a_problem_that_was_computed_goes_with_the_last_reference_to_it(order: int, shape: tuple[int, ...]) -> None:
    backend = cuda_backend()
    problem = random_problem(spec_of(order, shape))
    arrays = [weakref.ref(problem.x), weakref.ref(problem.reserve_space_1)]
    gc.disable()  # else the collector would hide a cycle of references
    try:
        backend.run([problem, problem])
        assert problem.prepared is not None
        del problem
        assert [array() for array in arrays] == [None, None]
    finally:
        gc.enable()


def test_what_was_prepared_for_all_of_a_problem_is_not_taken_for_a_part_of_it() -> None:
    problem = first_order_problem(spec_of(1, (4, 8)))
    all_of_it = prepare(Piece(problem, 0, 8), TRAITS)
    part = prepare(Piece(problem, 2, 6), TRAITS)
    assert part.footprint.channels == 4
    assert prepare(Piece(problem, 0, 8), TRAITS) is all_of_it
    assert prepare(Piece(problem, 0, 8), TRAITS._replace(shared_nbytes=0)) is not all_of_it


def test_the_device_memory_of_a_problem_is_the_same_before_and_after_it_is_prepared() -> None:
    for channels in (None, range(3, 7)):
        problem = first_order_problem(spec_of(1, (4, 8)))
        problem.channels = channels
        count = problem.channel_count
        before = device_nbytes(problem)
        prepare(Piece(problem, 8 - count, 8), TRAITS)
        assert problem.prepared is not None
        assert device_nbytes(problem) == before == count * 4 * (3 * 4 + 5)
