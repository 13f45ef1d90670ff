"""The kernels' PTX on a simulated GPU, several blocks of it at a time. `make gpu-simulate` runs this, without a GPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.gpu.simulator.device import SimulatedDevice, configure
from tests.kernels.cuda.devices import EmulatedDevice
from tests.kernels.problems import DTYPES, assert_right, bits, first_order_problem, second_order_problem, spec_of

from bngrad_kernels.cuda.backend import CudaBackend
from bngrad_kernels.cuda.kernel_selection import Traits
from bngrad_kernels.spec import Spec

SIMULATOR = os.environ.get("BNGRAD_SIMULATOR", "")
if not SIMULATOR:
    pytest.skip("make gpu-simulate runs it, with GPGPU-Sim", allow_module_level=True)

PROCESSORS = 4
TRAITS = Traits(PROCESSORS, shared_nbytes=96 << 10, cache_nbytes=6 << 20)

SHAPES = [  # (N, C, inner)
    (33, 64, 1), (700, 104, 1), (2, 2048, 1),  # channels last, resident
    (3000, 64, 1),  # the same, streamed
    (1000, 3, 1), (35, 150, 1), (4, 5, 2),  # vectors that cannot be loaded in one piece
    (32, 64, 49), (9, 6, 196),  # channels first, several channels a group
    (9, 3, 127), (2, 3, 4000), (12, 3, 1023),  # one channel a group
]  # fmt: skip


@pytest.fixture(scope="module")
def backends(tmp_path_factory: pytest.TempPathFactory) -> tuple[CudaBackend, CudaBackend]:
    """A simulated GPU, and a CPU that runs the same source."""
    folder = tmp_path_factory.mktemp("simulator")
    simulator = Path(SIMULATOR).resolve()
    os.chdir(folder)
    configure(folder, simulator, {"gpgpu_n_clusters": PROCESSORS})
    made = (
        CudaBackend(SimulatedDevice(simulator, TRAITS), chunk_nbytes=8 << 20),
        CudaBackend(EmulatedDevice(traits=TRAITS)),
    )
    for each in made:
        each.warm_up()
    return made


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_first_order_is_right_and_has_the_bits_of_a_cpu(
    backends: tuple[CudaBackend, CudaBackend], shape: tuple[int, ...], dtype: Any, is_training: bool
) -> None:
    on_gpu, on_cpu = (first_order_problem(Spec(dtype, shape, 1, is_training=is_training)) for _ in backends)
    for backend, made in zip(backends, (on_gpu, on_cpu), strict=True):
        backend.run([made])
    assert_right(on_gpu)
    assert bits(on_gpu) == bits(on_cpu)


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(700, 104, 1), (35, 150, 1), (32, 64, 49), (9, 3, 127), (2, 3, 4000)], ids=str)
def test_the_second_order_has_the_bits_of_a_cpu(
    backends: tuple[CudaBackend, CudaBackend], shape: tuple[int, ...], dtype: Any, is_training: bool
) -> None:
    spec = spec_of(2, shape, dtype, is_training=is_training)
    on_gpu, on_cpu = (second_order_problem(spec) for _ in backends)
    for backend, made in zip(backends, (on_gpu, on_cpu), strict=True):
        backend.run([made])
    assert bits(on_gpu) == bits(on_cpu)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_batch_has_the_bits_of_its_requests_alone(backends: tuple[CudaBackend, CudaBackend], dtype: Any) -> None:
    on_gpu, on_cpu = ([first_order_problem(Spec(dtype, shape, 1)) for shape in SHAPES] for _ in backends)
    backends[0].run(on_gpu)
    for made in on_cpu:
        backends[1].run([made])
    assert [bits(made) for made in on_gpu] == [bits(made) for made in on_cpu]
