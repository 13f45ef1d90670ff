"""Gradients that this process computes, read and written where PyTorch's tensors lie."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from bngrad.torch import _layout
from bngrad.typing import DataFormat

if TYPE_CHECKING:
    from bngrad._local.kernels import LocalKernels

_DTYPES = {
    torch.float32: np.dtype(np.float32),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.float16: np.dtype(np.float16),
}
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def gradients(
    kernels: LocalKernels, y_backprop: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor,
    epsilon: float, is_training: bool,
) -> tuple[Tensor, Tensor, Tensor] | None:  # fmt: skip
    """Does what `bngrad.torch._ops.gradients` does with less Python, which costs more than a small gradient.

    Returns None, and has computed nothing, for inputs that need another copy or that the op's contract refuses.
    """
    memory_format = torch.contiguous_format if x.is_contiguous() else _CHANNELS_LAST.get(x.dim())
    if not x.is_cpu or memory_format is None or not x.is_contiguous(memory_format=memory_format):
        return None
    if x.is_neg() or y_backprop.is_neg():
        return None
    y_backprop = y_backprop.contiguous(memory_format=memory_format)
    scale = None if weight is None else weight.float().contiguous()
    mean, rstd = mean.float().contiguous(), rstd.float().contiguous()
    scale_backprop, offset_backprop = torch.empty_like(mean), torch.empty_like(mean)
    addresses = {
        "y_backprop": y_backprop.data_ptr(),
        "x": x.data_ptr(),
        "scale": 0 if scale is None else scale.data_ptr(),
        "reserve_space_1": mean.data_ptr(),
        "reserve_space_2": rstd.data_ptr(),
        "scale_backprop": scale_backprop.data_ptr(),
        "offset_backprop": offset_backprop.data_ptr(),
    }
    if any(address % x.element_size() for address in addresses.values()):
        return None
    channels_last = x.dim() == 2 or memory_format is not torch.contiguous_format
    shape = _layout.shape_for_client(x, channels_last=channels_last)
    data_format: DataFormat = "NHWC" if channels_last else "NCHW"
    x_backprop = kernels.gradients_at(_DTYPES[x.dtype], shape, data_format, addresses, epsilon, is_training)
    if x_backprop is None:
        return None
    return _layout.from_client(x_backprop, x, channels_last=channels_last), scale_backprop, offset_backprop
