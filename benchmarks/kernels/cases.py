"""The cases that are timed: the batch-norm layers of ResNet-50, and their inputs."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from bngrad_kernels import reference
from bngrad_kernels.problem import Array, Problem
from bngrad_kernels.spec import BFLOAT16, FLOAT16, FLOAT32, Spec

BATCH = 32
RESNET50 = (
    (64, 112, 112), (64, 56, 56), (256, 56, 56), (128, 28, 28), (512, 28, 28),
    (256, 14, 14), (1024, 14, 14), (512, 7, 7), (2048, 7, 7),
)  # fmt: skip
"""(C, H, W) of every batch-norm layer, largest image first."""
DTYPES = {dtype.name: dtype for dtype in (FLOAT32, BFLOAT16, FLOAT16)}
LAYOUTS = ("NHWC", "NCHW")
_ALIGNMENT = 4096
_CHECKED_ELEMENTS = 4_000_000
# What an answer computed right, however summed, stays below: of the largest x_backprop, and of the sum of |terms|.
_TENSOR_TOLERANCES = {FLOAT32: 1e-5, BFLOAT16: 2**-7, FLOAT16: 2**-10}
_SUM_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Case:
    layout: str
    dtype: str
    chw: tuple[int, int, int]
    is_training: bool = True

    @property
    def spec(self) -> Spec:
        channels, height, width = self.chw
        last = self.layout == "NHWC"
        shape = (BATCH, height, width, channels) if last else (BATCH, *self.chw)
        return Spec(DTYPES[self.dtype], shape, 3 if last else 1, is_training=self.is_training)

    def __str__(self) -> str:
        return f"{self.layout} {self.dtype:8} {'x'.join(map(str, self.chw)):>10}"


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An array at the start of a page, so that no rival is slowed by where its memory happens to lie."""
    nbytes = int(np.prod(shape)) * dtype.itemsize
    memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    array: Array = memory[start : start + nbytes].view(dtype).reshape(shape)
    return array


def problem(spec: Spec, dy: Array, x: Array) -> Problem:
    """A problem on aligned copies of dy and x, with outputs full of NaN."""
    tensors = [aligned_empty(spec.shape, spec.dtype) for _ in range(3)]
    np.copyto(tensors[0], dy)
    np.copyto(tensors[1], x)
    rng = np.random.default_rng(spec.channels)
    vectors = [aligned_empty((spec.channels,), spec.stats_dtype) for _ in range(5)]
    for vector, low, high in zip(vectors, (0.5, -0.2, 0.5), (1.5, 0.2, 1.5), strict=False):
        vector[:] = rng.uniform(low, high, spec.channels)
    made = Problem(spec, tensors[0], tensors[1], vectors[0], vectors[1], vectors[2], tensors[2], vectors[3], vectors[4])
    poison(made)
    return made


def poison(made: Problem) -> None:
    """Makes all outputs NaN, bit pattern all ones."""
    for output in (made.x_backprop, made.scale_backprop, made.offset_backprop):
        output.view(np.uint8)[...] = 0xFF


@functools.cache
def _normal(elements: int) -> Array:
    """The same numbers for each layout and dtype: making them takes longer than most kernels."""
    return np.random.default_rng(elements).standard_normal(elements, np.float32)


def fill(spec: Spec, dy: Array, x: Array) -> None:
    normal = _normal(int(np.prod(spec.shape)) + 1)
    for array, start in ((dy, 0), (x, 1)):
        array.reshape(-1)[:] = normal[start : start + array.size]


def wrong(made: Problem, gradients: tuple[Array, Array, Array]) -> str | None:
    """What is wrong with a rival's answer: the last poison left, or far from the float64 reference.

    Every element is looked at for poison. Of large tensors, some channels are recomputed.
    """
    spec = made.spec
    x_backprop, scale_backprop, offset_backprop = gradients
    if x_backprop.shape != spec.shape or x_backprop.dtype != spec.dtype:
        return f"x_backprop is {x_backprop.dtype}{x_backprop.shape}"
    if (x_backprop.view(f"u{spec.dtype.itemsize}") == 256**spec.dtype.itemsize - 1).any():
        return "x_backprop was not written everywhere"
    count = max(1, min(spec.channels, _CHECKED_ELEMENTS // spec.elements_per_channel))
    channels = np.unique(np.linspace(0, spec.channels - 1, count).astype(int))
    dy, x, dx = (np.take(a, channels, spec.channel_axis) for a in (made.y_backprop, made.x, x_backprop))
    part = Spec(spec.dtype, dx.shape, spec.channel_axis, epsilon=spec.epsilon, is_training=spec.is_training)
    assert made.scale is not None
    vectors = made.scale[channels], made.reserve_space_1[channels], made.reserve_space_2[channels]
    expected = reference.fused_batch_norm_grad(part, dy, x, *vectors)
    magnitudes = reference.fused_batch_norm_grad(part, abs(dy), abs(x) + 1, *vectors)
    tensor_error = np.max(np.abs(dx.astype(np.float64) - expected.x_backprop)) / np.max(np.abs(expected.x_backprop))
    if not tensor_error <= _TENSOR_TOLERANCES[spec.dtype]:
        return f"x_backprop is off by {tensor_error:.1e} of its largest value"
    for name, got in (("scale_backprop", scale_backprop), ("offset_backprop", offset_backprop)):
        error = np.max(np.abs(got[channels] - getattr(expected, name)) / getattr(magnitudes, name))
        if not error <= _SUM_TOLERANCE:
            return f"{name} is off by {error:.1e} of the sum of its terms"
    return None
