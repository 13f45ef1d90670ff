"""Requests that commands send, and how far the answers to them are off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

import bngrad
from bngrad_kernels import accuracy
from bngrad_kernels.problem import Array
from bngrad_kernels.spec import Spec

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {dtype.name: dtype for dtype in (np.dtype(np.float32), np.dtype(np.float16), BFLOAT16)}


@dataclass(frozen=True, slots=True)
class Request:
    """A call to make.

    Attributes:
        op: V3, V2 or oneDNN.
        data: Where the tensors come from.
        data_format: As the op takes it.
        epsilon: As the op takes it.
        inputs: y_backprop, x, scale, mean, variance.
    """

    op: str
    data: str
    data_format: str
    epsilon: float
    inputs: tuple[Array, ...]

    @property
    def spec(self) -> Spec:
        """What is to be computed."""
        y_backprop, _, scale, _, _ = self.inputs
        axis = y_backprop.ndim - 1 if self.data_format.endswith("C") else 1
        return Spec(y_backprop.dtype, y_backprop.shape, axis, stats_dtype=scale.dtype, epsilon=self.epsilon)

    @property
    def nbytes(self) -> int:
        """The size of the tensors that are sent and received, in bytes."""
        _, x, scale, _, _ = self.inputs
        return sum(array.nbytes for array in (*self.inputs, x, scale, scale))

    def send(self, client: bngrad.Client, out: Array | None = None) -> tuple[Array, ...]:
        """Makes the call; out is where to put x_backprop."""
        y_backprop, x, scale, mean, variance = self.inputs
        attributes: dict[str, Any] = {"epsilon": self.epsilon, "data_format": self.data_format, "out": out}
        if self.op == "oneDNN":
            return client.batch_norm_training_backprop(x, y_backprop, mean, variance, scale, **attributes)
        if self.op == "V2":
            return client.fused_batch_norm_grad_v2(y_backprop, x, scale, mean, variance, **attributes)
        return client.fused_batch_norm_grad_v3(y_backprop, x, scale, mean, variance, None, **attributes)

    def is_right(self, outputs: tuple[Array, ...]) -> bool:
        """Whether an answer is as near to the float64 reference as is promised."""
        errors, bounds = accuracy.errors(self.spec, self.inputs, outputs), accuracy.bounds(self.spec)
        return all(error <= bound for error, bound in zip(errors, bounds, strict=True))


def random_request(
    op: str, data_format: str, dtype: np.dtype[Any], shape: tuple[int, ...], data: str = "random"
) -> Request:
    """A request of random tensors, the same at every call."""
    rng = np.random.default_rng(0)
    channels = shape[-1] if data_format.endswith("C") else shape[1]
    y_backprop, x = (rng.standard_normal(shape, np.float32).astype(dtype) for _ in range(2))
    vectors = [rng.uniform(0.5, 1.5, channels).astype(np.float32) for _ in range(3)]
    return Request(op, data, data_format, 1e-5, (y_backprop, x, *vectors))
