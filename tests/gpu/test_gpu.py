"""What only a GPU can show. `make gpu-test` runs this, and the kernels' own tests on the GPU."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
from typing import Any

import numpy as np
import pytest
from tests.unit.kernels import second_order
from tests.unit.kernels.cuda.devices import EmulatedDevice, gpu
from tests.unit.kernels.cuda.test_kernels import SHAPES
from tests.unit.kernels.problems import DTYPES, assert_right, bits, outputs, problem

from bngrad_kernels.cuda.backend import CudaBackend
from bngrad_kernels.problem import Problem
from bngrad_kernels.spec import FLOAT16, FLOAT32, Spec

DEVICE = os.environ.get("BNGRAD_TEST_DEVICE", "cpu")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cpu", reason="make gpu-test runs it, on a machine with a GPU"),
]


@pytest.fixture(scope="module")
def backend() -> CudaBackend:
    made = CudaBackend(gpu(DEVICE))
    made.warm_up()
    return made


def test_the_description_names_the_device(backend: CudaBackend) -> None:
    print(backend.description)
    for word in ("GiB", "compute capability", "driver", "CuPy"):
        assert word in backend.description


@pytest.mark.skipif(shutil.which("g++") is None, reason="the CPU's side needs g++")
@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gpu_and_a_cpu_give_the_same_bits(backend: CudaBackend, dtype: Any, is_training: bool) -> None:
    emulator = CudaBackend(EmulatedDevice())
    emulator.warm_up()
    specs = [Spec(dtype, shape, 1, is_training=is_training) for shape in SHAPES]
    on_gpu, on_cpu = [problem(spec) for spec in specs], [problem(spec) for spec in specs]
    backend.run(on_gpu)
    emulator.run(on_cpu)
    differing = [spec.shape for spec, a, b in zip(specs, on_gpu, on_cpu, strict=True) if bits(a) != bits(b)]
    assert not differing


@pytest.mark.skipif(shutil.which("g++") is None, reason="the CPU's side needs g++")
@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gpu_and_a_cpu_give_the_same_bits_of_the_second_order(
    backend: CudaBackend, dtype: Any, is_training: bool
) -> None:
    emulator = CudaBackend(EmulatedDevice())
    emulator.warm_up()
    specs = [second_order.second(shape, dtype, is_training=is_training) for shape in SHAPES]
    on_gpu, on_cpu = [second_order.problem(spec) for spec in specs], [second_order.problem(spec) for spec in specs]
    backend.run(on_gpu)
    emulator.run(on_cpu)
    both = zip(specs, on_gpu, on_cpu, strict=True)
    assert not [spec.shape for spec, a, b in both if second_order.bits(a) != second_order.bits(b)]


def test_a_hundred_runs_give_the_same_bits(backend: CudaBackend) -> None:
    specs = [Spec(dtype, shape, 1) for dtype, shape in itertools.product(DTYPES, [(100_000, 64, 1), (32, 64, 784)])]
    batch = [problem(spec) for spec in specs]
    backend.run(batch)
    expected = [bits(made) for made in batch]
    for _ in range(100):
        for made in batch:
            for output in outputs(made):
                output.fill(np.nan)
        backend.run(batch)
        assert [bits(made) for made in batch] == expected


def test_a_hundred_runs_give_the_same_bits_of_the_second_order(backend: CudaBackend) -> None:
    batch = [second_order.problem(second_order.second(shape, dtype))
             for dtype, shape in itertools.product(DTYPES, [(100_000, 64, 1), (32, 64, 784)])]  # fmt: skip
    backend.run(batch)
    expected = [second_order.bits(made) for made in batch]
    for _ in range(100):
        for made in batch:
            for output in second_order.outputs(made):
                output.fill(np.nan)
        backend.run(batch)
        assert [second_order.bits(made) for made in batch] == expected


@pytest.mark.parametrize("shape", [(100_000, 256, 1), (64, 256, 1600)], ids=str)
def test_a_problem_cut_into_many_pieces_has_the_bits_of_the_whole(backend: CudaBackend, shape: tuple[int, ...]) -> None:
    whole, cut = problem(Spec(FLOAT16, shape, 1)), problem(Spec(FLOAT16, shape, 1))
    backend.run([whole])
    pieces = CudaBackend(gpu(DEVICE), stream_nbytes=1 << 22, chunk_nbytes=1 << 23)
    pieces.warm_up()
    pieces.run([cut])
    assert bits(whole) == bits(cut)


def test_page_locked_memory_gives_the_same_bits(backend: CudaBackend) -> None:
    spec = Spec(FLOAT32, (50_000, 64), 1)
    made = problem(spec)
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


def test_threads_may_share_the_back_end(backend: CudaBackend) -> None:
    batches = [[problem(Spec(FLOAT32, (500 * n, 64), 1), seed=n) for n in range(1, 20)] for _ in range(4)]
    threads = [threading.Thread(target=backend.run, args=(batch,)) for batch in batches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for made in itertools.chain.from_iterable(batches):
        assert_right(made)


def test_what_does_not_fit_the_device_is_refused_and_the_next_batch_is_computed(backend: CudaBackend) -> None:
    tensor = np.broadcast_to(np.float16(0), (1 << 38, 1))  # half a terabyte that is not there
    one = np.ones(1, np.float32)
    spec = Spec(FLOAT16, tensor.shape, 1)
    made = Problem(spec, tensor, tensor, one, one, one, tensor, one.copy(), one.copy())
    stream = backend._device.stream()
    with pytest.raises(MemoryError, match="the GPU has no"):
        stream.reserve(3 * made.tensor_nbytes)
    after = problem(Spec(FLOAT32, (100, 64), 1))
    backend.run([after])
    assert_right(after)
