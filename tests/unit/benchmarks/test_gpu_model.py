"""The model of the kernels' time on GPUs: its figures must not get worse."""

from __future__ import annotations

import math
import statistics

import pytest
from benchmarks.gpu.model import BEFORE, GPUS, NOW, Layer, predict
from benchmarks.gpu.request_model import CALL_S, batch, copies_s, second_order

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
