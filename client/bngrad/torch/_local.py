"""Gradients that this process computes, read and written where PyTorch's tensors lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from bngrad._deadline import ENDLESS, Cancellation
from bngrad.torch import _layout
from bngrad.typing import DataFormat

if TYPE_CHECKING:
    from bngrad._local.kernels import LocalKernels

_DTYPES = {
    torch.float32: np.dtype(np.float32),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.float16: np.dtype(np.float16),
}
_POOLED_FROM_NBYTES = 32 << 20
"""glibc, and so PyTorch, gives larger tensors back to the system; fresh pages cost more than the kernel that fills
them. Up to here PyTorch's own memory is as good, and a tensor of it takes 0.1 ms less of Python with cold caches."""


def gradients(
    kernels: LocalKernels, y_backprop: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor,
    epsilon: float, is_training: bool,
) -> tuple[Tensor, Tensor, Tensor] | None:  # fmt: skip
    """Does what `bngrad.torch._ops.gradients` does with less Python, which costs more than a small gradient.

    Returns None, and has computed nothing, for inputs that need another copy or that the op's contract refuses.
    """
    memory_format = torch.contiguous_format
    if not x.is_contiguous():
        memory_format = _layout.CHANNELS_LAST.get(x.dim(), memory_format)
        if not x.is_contiguous(memory_format=memory_format):
            return None
    if not x.is_cpu or not _fit(y_backprop, x, (weight, mean, rstd)):
        return None
    y_backprop = y_backprop.contiguous(memory_format=memory_format)
    channels_last = x.dim() == 2 or memory_format is not torch.contiguous_format
    dtype = _DTYPES[x.dtype]
    x_backprop = _new_like(kernels, x, dtype, channels_last=channels_last)
    scale = None if weight is None else _vector(weight)
    mean, rstd = _vector(mean), _vector(rstd)
    scale_backprop, offset_backprop = torch.empty_like(mean), torch.empty_like(mean)
    addresses = (
        y_backprop.data_ptr(), x.data_ptr(), x_backprop.data_ptr(),
        0 if scale is None else scale.data_ptr(), mean.data_ptr(), rstd.data_ptr(),
        scale_backprop.data_ptr(), offset_backprop.data_ptr(),
    )  # fmt: skip
    all_bits = 0
    for address in addresses:
        all_bits |= address
    shape = _layout.shape_for_client(x, channels_last=channels_last)
    data_format: DataFormat = "NHWC" if channels_last else "NCHW"
    is_aligned = all_bits % dtype.itemsize == 0
    if is_aligned and kernels.gradients_at(dtype, shape, data_format, epsilon, is_training, *addresses):
        return x_backprop, scale_backprop, offset_backprop
    return None


def _fit(y_backprop: Tensor, x: Tensor, per_channel: Sequence[Tensor | None]) -> bool:
    """Returns whether the kernel, which gets addresses, would read the tensors' values and no other memory."""
    dtype, shape = x.dtype, x.shape
    if dtype not in _DTYPES or y_backprop.dtype is not dtype or y_backprop.shape != shape or not y_backprop.is_cpu:
        return False
    for values in per_channel:
        if values is None:
            continue
        if values.numel() != shape[1] or not values.is_cpu or not _layout.is_as_stored(values):
            return False
    return 0 not in shape and _layout.is_as_stored(x) and _layout.is_as_stored(y_backprop)


def _new_like(kernels: LocalKernels, x: Tensor, dtype: np.dtype[Any], *, channels_last: bool) -> Tensor:
    """Returns memory for the gradient of x."""
    if x.numel() * dtype.itemsize < _POOLED_FROM_NBYTES:
        return torch.empty_like(x)
    array = kernels.empty(_layout.shape_for_client(x, channels_last=channels_last), dtype, ENDLESS, Cancellation())
    return _layout.from_client(array, x, channels_last=channels_last)


def _vector(values: Tensor) -> Tensor:
    """Returns values per channel as the kernels take them."""
    is_ready = values.dtype is torch.float32 and values.is_contiguous()
    return values if is_ready else values.float().contiguous()
