"""What only a GPU can show. `make gpu-test` runs this, and the kernels' tests for all backends on the GPU."""

from __future__ import annotations

import itertools
import shutil
import threading
from typing import Any

import numpy as np
import pytest
from tests.kernels.backends import CUDA_SHAPES
from tests.kernels.cuda.devices import TEST_DEVICE, EmulatedDevice, cuda_backend, gpu
from tests.kernels.problems import (
    DTYPES,
    MODES,
    ORDERS,
    assert_right,
    bits,
    clear_outputs,
    first_order_problem,
    random_problem,
    spec_of,
)

from bngrad_kernels.cuda.backend import CudaBackend
from bngrad_kernels.problem import Problem
from bngrad_kernels.spec import FLOAT16, FLOAT32, Spec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(TEST_DEVICE == "cpu", reason="needs a GPU: make gpu-test runs it")]


@pytest.fixture(scope="module")
def backend() -> CudaBackend:
    return cuda_backend()


def test_the_description_names_the_device(backend: CudaBackend) -> None:
    print(backend.description)
    for word in ("GiB", "compute capability", "driver", "CuPy"):
        assert word in backend.description


@pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator needs g++")
@pytest.mark.parametrize("is_training", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_a_gpu_and_a_cpu_give_the_same_bits(backend: CudaBackend, order: int, dtype: Any, is_training: bool) -> None:
    emulator = CudaBackend(EmulatedDevice())
    emulator.warm_up()
    specs = [spec_of(order, shape, dtype, is_training=is_training) for shape in CUDA_SHAPES[1]]
    on_gpu, on_cpu = [random_problem(spec) for spec in specs], [random_problem(spec) for spec in specs]
    backend.run(on_gpu)
    emulator.run(on_cpu)
    differing = [spec.shape for spec, a, b in zip(specs, on_gpu, on_cpu, strict=True) if bits(a) != bits(b)]
    assert not differing


@pytest.mark.parametrize("order", ORDERS)
def test_a_hundred_runs_give_the_same_bits(backend: CudaBackend, order: int) -> None:
    batch = [random_problem(spec_of(order, shape, dtype))
             for dtype, shape in itertools.product(DTYPES, [(100_000, 64, 1), (32, 64, 784)])]  # fmt: skip
    backend.run(batch)
    expected = [bits(problem) for problem in batch]
    for _ in range(100):
        for problem in batch:
            clear_outputs(problem)
        backend.run(batch)
        assert [bits(problem) for problem in batch] == expected


@pytest.mark.parametrize("shape", [(100_000, 256, 1), (64, 256, 1600)], ids=str)
def test_a_problem_cut_into_many_pieces_has_the_bits_of_the_whole(backend: CudaBackend, shape: tuple[int, ...]) -> None:
    whole, cut = first_order_problem(Spec(FLOAT16, shape, 1)), first_order_problem(Spec(FLOAT16, shape, 1))
    backend.run([whole])
    pieces = cuda_backend(stream_nbytes=1 << 22, chunk_nbytes=1 << 23)
    pieces.run([cut])
    assert bits(whole) == bits(cut)


def test_page_locked_memory_gives_the_same_bits(backend: CudaBackend) -> None:
    spec = Spec(FLOAT32, (50_000, 64), 1)
    made = first_order_problem(spec)
    backend.run([made])
    memory = np.empty(3 * spec.tensor_nbytes, np.uint8)
    backend.register(memory)
    try:
        y_backprop, x, x_backprop = memory.view(np.float32).reshape(3, *spec.shape)
        y_backprop[...], x[...] = made.y_backprop, made.x
        stats = made.scale, made.reserve_space_1, made.reserve_space_2
        moved = Problem(spec, y_backprop, x, *stats, x_backprop, np.empty(64, np.float32), np.empty(64, np.float32))
        backend.run([moved])
        assert bits(moved) == bits(made)
    finally:
        backend.unregister(memory)


def test_threads_may_share_the_backend(backend: CudaBackend) -> None:
    batches = [[first_order_problem(Spec(FLOAT32, (500 * n, 64), 1), seed=n) for n in range(1, 20)] for _ in range(4)]
    threads = [threading.Thread(target=backend.run, args=(batch,)) for batch in batches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_right(*itertools.chain.from_iterable(batches))


def test_what_does_not_fit_the_device_is_refused_and_the_next_batch_is_computed(backend: CudaBackend) -> None:
    tensor = np.broadcast_to(np.float16(0), (1 << 38, 1))  # half a terabyte, more than any GPU has
    one = np.ones(1, np.float32)
    spec = Spec(FLOAT16, tensor.shape, 1)
    made = Problem(spec, tensor, tensor, one, one, one, tensor, one.copy(), one.copy())
    stream = gpu().stream()
    with pytest.raises(MemoryError, match="the GPU has no"):
        stream.reserve(3 * made.tensor_nbytes)
    after = first_order_problem(Spec(FLOAT32, (100, 64), 1))
    backend.run([after])
    assert_right(after)
