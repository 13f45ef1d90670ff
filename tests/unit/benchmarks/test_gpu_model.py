"""The model of the kernels' time on GPUs: its figures must not get worse."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import Any

import pytest
from benchmarks.gpu.model import BEFORE, GPUS, NOW, Gpu, Layer, predict
from benchmarks.gpu.request_model import CALL_S, batch, copies_s, second_order
from benchmarks.gpu.simulated import PART, TRAITS

from bngrad_kernels.cuda import descriptors, kernel_selection, plan
from bngrad_kernels.spec import FLOAT16, FLOAT32, Spec

KEPT = [  # time over that of three tensors' traffic
    ("H100", "NHWC", "bfloat16", (64, 112, 112), 1.62),
    ("H100", "NHWC", "bfloat16", (256, 56, 56), 1.07),
    ("H100", "NHWC", "bfloat16", (512, 28, 28), 1.21),
    ("H100", "NHWC", "bfloat16", (2048, 7, 7), 1.65),
    ("H100", "NHWC", "float32", (256, 56, 56), 1.05),
    ("H100", "NCHW", "bfloat16", (64, 112, 112), 1.08),
    ("H100", "NCHW", "bfloat16", (512, 28, 28), 1.15),
    ("H100", "NCHW", "bfloat16", (1024, 14, 14), 1.68),
    ("A100", "NHWC", "bfloat16", (256, 56, 56), 1.08),
    ("L4", "NHWC", "bfloat16", (256, 56, 56), 1.01),
    ("T4", "NHWC", "bfloat16", (1024, 14, 14), 1.11),
    ("H200", "NHWC", "bfloat16", (512, 28, 28), 1.32),
    ("B200", "NHWC", "bfloat16", (512, 28, 28), 1.55),
    ("B200", "NHWC", "bfloat16", (64, 112, 112), 1.31),
]


@pytest.mark.parametrize(("gpu", "layout", "dtype", "chw", "kept"), KEPT)
def test_predictions_do_not_get_worse(
    gpu: str, layout: str, dtype: str, chw: tuple[int, int, int], kept: float
) -> None:
    spec = Layer(layout, dtype, chw).spec
    predicted = predict(GPUS[gpu], spec)
    assert 1 < predicted.to_floor <= kept + 0.01
    assert predicted.seconds < predict(GPUS[gpu], spec, BEFORE).seconds


def test_loads_before_the_wait_help_on_the_mean_of_gpus_that_differ_in_their_number_of_processors() -> None:
    t4, spec = GPUS["T4"], Layer("NHWC", "bfloat16", (1024, 14, 14)).spec
    ratios = []
    for processors in range(32, 49):
        traits = t4.traits._replace(processors=processors)
        gpu = t4._replace(traits=traits, rate=t4.rate * processors / t4.traits.processors)
        ratios.append(predict(gpu, spec).seconds / predict(gpu, spec, NOW._replace(early_nbytes=0)).seconds)
    assert ratios[t4.traits.processors - 32] < 1.02  # the tiles fall among 40 processors' blocks less well
    assert statistics.geometric_mean(ratios) < 0.99


@pytest.fixture
def part_of_an_h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """What GPGPU-Sim simulates, planned for as `benchmarks.gpu.simulated` does."""
    with monkeypatch.context() as patch:
        patch.setattr(plan, "_ENOUGH_TILES", plan._ENOUGH_TILES // PART)
        patch.setattr(kernel_selection, "_MOST_AHEAD_NBYTES", kernel_selection._MOST_AHEAD_NBYTES // PART)
        forget_plans()
        yield Gpu(TRAITS, 1.755e9, 0.54e12)
    forget_plans()


def forget_plans() -> None:
    plan._cut.cache_clear()
    descriptors._template.cache_clear()


@pytest.mark.parametrize(
    ("dtype", "shape", "before", "now"),
    [
        (FLOAT32, (16, 32, 3136), 183_281, 161_740),
        (FLOAT32, (1568, 256), 72_462, 59_383),
        (FLOAT16, (16, 64, 3136), 195_680, 168_707),
    ],
)
def test_the_model_tells_about_half_of_gpgpu_sims_cycles_and_which_kernel_is_faster(
    part_of_an_h200: Gpu, dtype: Any, shape: tuple[int, ...], before: int, now: int
) -> None:
    spec = Spec(dtype, shape, 1)
    cycles, cycles_before = (
        predict(part_of_an_h200, spec, costs).seconds * part_of_an_h200.hz for costs in (NOW, BEFORE)
    )
    assert 0.4 < cycles / now < 0.5
    assert 0.4 < cycles_before / before < 0.56
    assert abs(cycles / cycles_before - now / before) < 0.16


def test_the_time_is_that_of_the_bytes_where_nothing_else_takes_time() -> None:
    gpu = GPUS["H100"]._replace(hz=1e15)
    streamed, cached = (predict(gpu, Layer("NHWC", "bfloat16", chw).spec) for chw in ((64, 112, 112), (512, 28, 28)))
    assert 1.5 < streamed.to_floor <= 5 / 3
    assert math.isclose(cached.to_floor, 1, rel_tol=0.01)


@pytest.mark.parametrize("gpu", GPUS)
def test_a_request_waits_for_its_copies_rather_than_for_sums_in_float64_or_calls(gpu: str) -> None:
    for itemsize in (2, 4):
        predicted = second_order(gpu, itemsize)
        assert predicted.copies > 2 * predicted.by_float64
    made = batch(gpu)
    assert made.calls * CALL_S < copies_s(gpu)
    assert made.launches * CALL_S < copies_s(gpu) / 100
