"""The requests that commands send, and the check of their results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

import bngrad
from bngrad_kernels import tolerances
from bngrad_kernels.problem import Array
from bngrad_kernels.spec import Spec

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {dtype.name: dtype for dtype in (np.dtype(np.float32), np.dtype(np.float16), BFLOAT16)}


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """A call to make, with its tensors.

    Attributes:
        op: V3, V2, oneDNN, or GradGrad for the gradients of the gradients.
        data: Where the tensors come from.
        data_format: The argument of the op.
        epsilon: The argument of the op.
        inputs: y_backprop, x, scale, mean, variance; for GradGrad after the gradients of the three outputs.
        is_training: The argument of the op; oneDNN has training only.
    """

    op: str
    data: str
    data_format: str
    epsilon: float
    inputs: tuple[Array, ...]
    is_training: bool = True

    @property
    def spec(self) -> Spec:
        """The specification of the computation."""
        *_, x, scale, _, _ = self.inputs
        axis = _channel_axis(self.data_format, x.shape)
        order = 2 if self.op == "GradGrad" else 1
        return Spec(
            x.dtype,
            x.shape,
            axis,
            stats_dtype=scale.dtype,
            epsilon=self.epsilon,
            is_training=self.is_training,
            order=order,
        )

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors sent and received."""
        *_, x, scale, _, _ = self.inputs
        outputs = (x, x, scale) if self.op == "GradGrad" else (x, scale, scale)
        return sum(array.nbytes for array in (*self.inputs, *outputs))

    def send(self, client: bngrad.Client, out: Array | None = None) -> tuple[Array, ...]:
        """Makes the call, and returns its outputs; the gradient of x goes into ``out`` if given."""
        attributes: dict[str, Any] = {"epsilon": self.epsilon, "data_format": self.data_format}
        if self.op != "oneDNN":
            attributes["is_training"] = self.is_training
        if self.op == "GradGrad":
            of_x, of_scale, of_offset, y_backprop, x, scale, mean, variance = self.inputs
            return client.fused_batch_norm_grad_grad(
                of_x, of_scale, of_offset, y_backprop, x, scale, mean, variance, out=(None, out), **attributes
            )
        y_backprop, x, scale, mean, variance = self.inputs
        attributes["out"] = out
        if self.op == "oneDNN":
            return client.batch_norm_training_backprop(x, y_backprop, mean, variance, scale, **attributes)
        if self.op == "V2":
            return client.fused_batch_norm_grad_v2(y_backprop, x, scale, mean, variance, **attributes)
        return client.fused_batch_norm_grad_v3(y_backprop, x, scale, mean, variance, None, **attributes)

    def is_right(self, outputs: tuple[Array, ...]) -> bool:
        """Whether the outputs differ from the float64 reference by no more than the documented tolerances."""
        if self.op == "GradGrad":
            errors: tuple[float, ...] = tolerances.grad_grad_errors(self.spec, self.inputs, outputs)
            bounds: tuple[float, ...] = tolerances.grad_grad_bounds(self.spec)
        else:
            errors, bounds = tolerances.errors(self.spec, self.inputs, outputs), tolerances.bounds(self.spec)
        return all(error <= bound for error, bound in zip(errors, bounds, strict=True))


def random_request(
    op: str, data_format: str, dtype: np.dtype[Any], shape: tuple[int, ...], data: str = "random"
) -> SampleRequest:
    """Makes a request of random tensors, the same at every call."""
    rng = np.random.default_rng(0)
    channels = shape[_channel_axis(data_format, shape)]

    def tensor() -> Array:
        return rng.standard_normal(shape, np.float32).astype(dtype)

    def vector() -> Array:
        return rng.uniform(0.5, 1.5, channels).astype(np.float32)

    gradients = (tensor(), vector(), vector()) if op == "GradGrad" else ()
    inputs = (*gradients, tensor(), tensor(), vector(), vector(), vector())
    return SampleRequest(op, data, data_format, 1e-5, inputs)


def _channel_axis(data_format: str, shape: tuple[int, ...]) -> int:
    return len(shape) - 1 if data_format.endswith("C") else 1
