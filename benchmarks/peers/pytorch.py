"""PyTorch: ``aten::native_batch_norm_backward``, which autograd calls for batch norm on a CPU."""

from __future__ import annotations

from typing import TypeAlias

import ml_dtypes
import numpy as np
import torch
from benchmarks.peers import UnsupportedError

from bngrad_kernels.problem import Array, Problem
from bngrad_kernels.spec import ReserveSpace2Kind, Spec

_Statistics: TypeAlias = tuple[torch.Tensor | None, torch.Tensor | None]
_OUTPUT_MASK = [True, True, True]


class PyTorchKernel:
    """One call of ``native_batch_norm_backward``.

    PyTorch allocates the outputs: its variant with ``out=`` does so too, and then copies.
    """

    def __init__(self, problem: Problem) -> None:
        spec = problem.spec
        self._spec = spec
        weight = None if problem.scale is None else to_torch(problem.scale)
        mean = to_torch(problem.reserve_space_1)
        if spec.is_training:
            running: _Statistics = None, None
            saved: _Statistics = (mean, to_torch(inverse_std(problem)))
        else:
            running, saved = (mean, to_torch(problem.reserve_space_2)), (None, None)
        self._arguments = (
            channels_second(spec, to_torch(problem.y_backprop)),
            channels_second(spec, to_torch(problem.x)),
            weight,
            *running,
            *saved,
            spec.is_training,
            spec.epsilon,
            _OUTPUT_MASK,
        )

    def run(self) -> None:
        self._outputs = torch.ops.aten.native_batch_norm_backward.default(*self._arguments)

    def gradients(self) -> tuple[Array, Array, Array]:
        x_backprop, scale_backprop, offset_backprop = self._outputs
        return (
            to_numpy(x_backprop.movedim(1, self._spec.channel_axis)),
            to_numpy(scale_backprop),
            to_numpy(offset_backprop),
        )


def prepare(problem: Problem) -> PyTorchKernel:
    spec = problem.spec
    if not spec.is_training and spec.reserve_space_2_kind is not ReserveSpace2Kind.VARIANCE:
        raise UnsupportedError("PyTorch takes a variance in evaluation mode")
    return PyTorchKernel(problem)


def inverse_std(problem: Problem) -> Array:
    """What PyTorch's forward pass saves: ``1 / sqrt(variance + epsilon)``, rounded to float32 once."""
    if problem.spec.reserve_space_2_kind is ReserveSpace2Kind.INVERSE_STD:
        return problem.reserve_space_2
    with np.errstate(divide="ignore", invalid="ignore"):
        rstd = 1 / np.sqrt(problem.reserve_space_2.astype(np.float64) + problem.spec.epsilon)
    return rstd.astype(problem.reserve_space_2.dtype)


def channels_second(spec: Spec, tensor: torch.Tensor) -> torch.Tensor:
    """PyTorch's order of dimensions; the memory stays as it is, so NHWC becomes ``channels_last``."""
    return tensor.movedim(spec.channel_axis, 1)


def to_torch(array: Array) -> torch.Tensor:
    """A tensor on the array's own memory."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(tensor: torch.Tensor) -> Array:
    array: Array
    if tensor.dtype == torch.bfloat16:
        array = tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    else:
        array = tensor.contiguous().numpy()
    return array


def version() -> str:
    return torch.__version__
