"""Random inputs of the ops, and checks of their gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from bngrad_kernels import tolerances
from bngrad_kernels.problem import Array
from bngrad_kernels.spec import FLOAT32, ReserveSpace2Kind, Spec


class Inputs(NamedTuple):
    """The arguments of TensorFlow's ops, in their order."""

    y_backprop: Array
    x: Array
    scale: Array
    reserve_space_1: Array
    reserve_space_2: Array


def random_inputs(spec: Spec, seed: int = 0) -> Inputs:
    rng = np.random.default_rng(seed)

    def stats(low: float, high: float) -> Array:
        return rng.uniform(low, high, spec.channels).astype(spec.stats_dtype)

    return Inputs(
        rng.normal(size=spec.shape).astype(spec.dtype),
        rng.normal(1, 2, size=spec.shape).astype(spec.dtype),
        stats(0.5, 2),
        stats(0.5, 1.5),
        stats(3, 5) if spec.reserve_space_2_kind is ReserveSpace2Kind.VARIANCE else stats(0.4, 0.6),
    )


def assert_gradients(spec: Spec, inputs: Inputs, outputs: tuple[Any, ...]) -> None:
    """Asserts that the first three outputs are the gradients, within the contract's bounds."""
    x_backprop, scale_backprop, offset_backprop = outputs[:3]
    assert (x_backprop.shape, x_backprop.dtype) == (spec.shape, spec.dtype)
    assert scale_backprop.shape == offset_backprop.shape == (spec.channels,)
    assert scale_backprop.dtype == offset_backprop.dtype == spec.stats_dtype
    errors, bounds = tolerances.errors(spec, inputs, outputs), tolerances.bounds(spec)
    assert all(error <= bound for error, bound in zip(errors, bounds, strict=True)), (errors, bounds)


class Case(NamedTuple):
    """An op on tensors of a shape; ``run`` returns its outputs, or an awaitable with an asynchronous client."""

    op: str
    data_format: str
    shape: tuple[int, ...]

    def spec(self, dtype: np.dtype[Any] = FLOAT32) -> Spec:
        return Spec(dtype, self.shape, len(self.shape) - 1 if self.data_format.endswith("C") else 1)

    def run(self, client: Any, inputs: Inputs, out: Array | None = None, timeout: float | None = None) -> Any:
        y_backprop, x, scale, mean, variance = inputs
        kind = {"data_format": self.data_format, "out": out, "timeout": timeout}
        if self.op == "v2":
            return client.fused_batch_norm_grad_v2(*inputs, **kind)
        if self.op == "v3":
            return client.fused_batch_norm_grad_v3(*inputs, np.empty(0, np.float32), **kind)
        return client.batch_norm_training_backprop(x, y_backprop, mean, variance, scale, epsilon=1e-4, **kind)


def assert_same_bits(ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> None:
    for our, their in zip(ours[:3], theirs[:3], strict=True):
        assert (our.shape, our.dtype) == (their.shape, their.dtype)
        assert our.tobytes() == their.tobytes()
