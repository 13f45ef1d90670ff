"""Inputs that are copied to a GPU before there is a problem that needs them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.kernels.cuda.devices import EmulatedDevice, cuda_backend
from tests.kernels.problems import ORDERS, bits, clear_outputs, random_problem, spec_of

from bngrad_kernels.cuda.backend import CudaBackend
from bngrad_kernels.cuda.streams import CudaStream
from bngrad_kernels.problem import Array

LEAST_NBYTES = 1 << 18
"""Smaller inputs are copied together, with the problem."""


def flat(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


CASES: list[tuple[int, tuple[int, ...], dict[str, int]]] = [
    *((order, shape, {}) for order in ORDERS for shape in ((60, 32, 90), (2, 9, 9000), (3000, 70))),
    *((1, shape, {"piece_nbytes": 2_500_000, "stream_nbytes": 4 << 20}) for shape in ((64, 32, 200), (2, 8, 20_000))),
]
"""Orders, shapes, and the sizes by which the backend cuts the last ones into pieces."""


@pytest.mark.parametrize(("order", "shape", "sizes"), CASES, ids=str)
def test_what_was_copied_ahead_is_not_read_from_the_host(
    order: int, shape: tuple[int, ...], sizes: dict[str, Any]
) -> None:
    problem = random_problem(spec_of(order, shape))
    backend = cuda_backend(**sizes)
    backend.run([problem])
    expected = bits(problem)
    for name in problem.large_inputs:
        clear_outputs(problem)
        array = getattr(problem, name)
        problem.on_device = {name: backend.copy_ahead(flat(array))}
        elements = array.copy()
        array[...] = np.nan
        backend.run([problem])
        array[...] = elements
        assert bits(problem) == expected, name


def test_the_channels_of_a_part_are_read_from_the_copy_of_the_whole() -> None:
    problem = random_problem(spec_of(1, (90, 32, 90)))
    backend = cuda_backend()
    backend.run([problem])
    expected = bits(problem)
    clear_outputs(problem)
    problem.on_device = {"x": backend.copy_ahead(flat(problem.x))}
    problem.x[...] = np.nan
    for problem.channels in (range(10), range(10, 32)):
        problem.prepared = None
        backend.run([problem])
    assert bits(problem) == expected


def test_a_copy_takes_device_memory_until_nothing_refers_to_it() -> None:
    backend = cuda_backend()
    before = backend.used_nbytes
    memory = np.zeros(1 << 20, np.uint8)
    copies = [backend.copy_ahead(memory) for _ in range(5)]
    assert backend.used_nbytes >= before + len(copies) * memory.nbytes
    most = backend.used_nbytes
    for _ in range(100):
        copies.pop(0)
        copies.append(backend.copy_ahead(memory))
    assert backend.used_nbytes == most


def test_copies_have_a_part_of_the_device_and_what_can_have_none_is_not_copied() -> None:
    backend = cuda_backend(most_nbytes=16 << 20)
    assert backend.copy_ahead(np.zeros(LEAST_NBYTES - 1, np.uint8)) is None
    assert backend.copy_ahead(np.zeros((4 << 20) + 1, np.uint8)) is None
    half = np.zeros(2 << 20, np.uint8)
    copies = [backend.copy_ahead(half), backend.copy_ahead(half)]
    with pytest.raises(MemoryError):
        backend.copy_ahead(np.zeros(LEAST_NBYTES, np.uint8))
    del copies[0]
    assert backend.copy_ahead(np.zeros(LEAST_NBYTES, np.uint8)) is not None


class ShortOnce(EmulatedDevice):
    """Is short of memory once, while copies ahead have some."""

    refusals = 1

    def stream(self) -> CudaStream:
        stream: Any = super().stream()
        reserve = stream.reserve

        def reserve_if_there(nbytes: int) -> None:
            if nbytes > 1 << 20 and self.refusals:
                self.refusals -= 1
                raise MemoryError(f"no {nbytes} bytes left")
            reserve(nbytes)

        stream.reserve = reserve_if_there
        made: CudaStream = stream
        return made


def test_copies_give_way_where_a_problem_needs_the_memory() -> None:
    problem = random_problem(spec_of(1, (60, 32, 90)))
    cuda_backend().run([problem])
    expected = bits(problem)
    clear_outputs(problem)
    device = ShortOnce()
    backend = CudaBackend(device, chunk_nbytes=1 << 20)
    backend.warm_up()
    before = backend.used_nbytes
    problem.on_device = {"x": backend.copy_ahead(flat(problem.x))}
    assert backend.used_nbytes == before + problem.x.nbytes
    backend.run([problem])
    assert device.refusals == 0
    assert problem.on_device["x"].memory is None  # it came from the host
    assert bits(problem) == expected
