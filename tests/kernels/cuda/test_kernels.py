"""The CUDA kernels' own properties: bits that depend neither on the blocks nor on the kind of kernel nor on pieces."""

from __future__ import annotations

from typing import Any

import pytest
from tests.kernels.backends import CUDA_SHAPES
from tests.kernels.cuda.devices import cuda_backend
from tests.kernels.problems import DTYPES, MODES, bits, random_problem, spec_of

from bngrad_kernels.cuda.backend import CudaBackend
from bngrad_kernels.spec import Spec

SHAPES = {1: CUDA_SHAPES[1], 2: [*CUDA_SHAPES[2], (70_000, 16, 1)]}
SHAPES_TO_CUT = {
    1: [shape for shape in CUDA_SHAPES[1] if 1 < shape[1] <= 104 and shape[0] < 10_000 and shape[2] < 10_000],
    2: [(33, 64, 1), (20, 104, 1), (40, 17, 1), (30, 5, 3), (7, 20, 9), (2, 3, 600)],
}
TENSORS_AND_VECTORS = {1: (3, 5), 2: (5, 6)}
"""The numbers of arrays of a problem, by order."""


@pytest.fixture(scope="module")
def backend() -> CudaBackend:
    return cuda_backend()


def assert_same_bits(one: CudaBackend, other: CudaBackend, specs: list[Spec]) -> None:
    batches = [random_problem(spec) for spec in specs], [random_problem(spec) for spec in specs]
    one.run(batches[0])
    other.run(batches[1])
    assert [bits(problem) for problem in batches[0]] == [bits(problem) for problem in batches[1]]


@pytest.mark.parametrize(("order", "blocks", "os_threads"), [(1, 1, 1), (1, 2, 2), (1, 17, 4), (2, 1, 1), (2, 17, 4)])
def test_the_bits_do_not_depend_on_how_many_blocks_run(
    backend: CudaBackend, order: int, blocks: int, os_threads: int
) -> None:
    specs = [spec_of(order, shape, dtype) for shape in SHAPES[order] for dtype in DTYPES]
    assert_same_bits(backend, cuda_backend(blocks, os_threads), specs)


def test_the_bits_do_not_depend_on_the_kind_of_kernel(backend: CudaBackend) -> None:
    specs = [spec_of(1, shape, dtype) for shape in SHAPES[1] for dtype in DTYPES]
    assert_same_bits(backend, cuda_backend(is_streamed=True), specs)


@pytest.mark.parametrize("is_training", MODES)
@pytest.mark.parametrize(("order", "channels_each"), [(1, 1), (1, 3), (1, 8), (1, 64), (2, 1), (2, 8), (2, 64)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_range_of_channels_has_the_bits_that_it_has_in_the_whole(
    backend: CudaBackend, dtype: Any, order: int, channels_each: int, is_training: bool
) -> None:
    tensors, vectors = TENSORS_AND_VECTORS[order]
    for shape in SHAPES_TO_CUT[order]:
        spec = spec_of(order, shape, dtype, is_training=is_training)
        whole, cut = random_problem(spec), random_problem(spec)
        backend.run([whole])
        channel_nbytes = tensors * spec.elements_per_channel * dtype.itemsize + vectors * 4
        cuda_backend(stream_nbytes=channels_each * channel_nbytes).run([cut])
        assert bits(whole) == bits(cut), spec
