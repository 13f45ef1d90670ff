"""Tensors of PyTorch as the client sends them: 4-D, in C order, in the CPU's memory; and back."""

from __future__ import annotations

import math
from collections.abc import Sequence

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from bngrad.typing import Array


def has_channels_last(x: Tensor) -> bool:
    """Returns whether the channels are next to each other in memory, as in ``torch.channels_last`` and in 2-D."""
    return x.dim() == 2 or (not x.is_contiguous() and x.movedim(1, -1).is_contiguous())


def empty_result(x: Tensor) -> Tensor:
    """Returns a tensor with the shape and the strides that `from_client` gives a result."""
    if has_channels_last(x):
        return torch.empty_like(x.movedim(1, -1), memory_format=torch.contiguous_format).movedim(-1, 1)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def for_client(tensors: Sequence[Tensor], *, channels_last: bool) -> list[Tensor]:
    """Returns tensors of shape (N, C, ...) as NHWC or NCHW in the CPU's memory; copies only those that differ."""
    views = []
    for tensor in tensors:
        n, c, m = tensor.shape[0], tensor.shape[1], math.prod(tensor.shape[2:])
        if channels_last:
            views.append(tensor.detach().movedim(1, -1).contiguous().view(n, 1, m, c))
        else:
            views.append(tensor.detach().contiguous().view(n, c, 1, m))
    if views[0].is_cuda:
        return _in_pinned_memory(views)
    return [view.cpu() for view in views]


def vector(values: Tensor) -> Tensor:
    """Returns values per channel as the client takes them."""
    return values.detach().to("cpu", torch.float32).contiguous()


def output_like(tensor: Tensor, device: torch.device) -> Tensor | None:
    """Returns page-locked memory for a result that goes to a GPU; otherwise None, so that the client makes an array."""
    return torch.empty_like(tensor, pin_memory=True) if device.type == "cuda" else None


def from_client(array: Array, x: Tensor, *, channels_last: bool) -> Tensor:
    """Returns a result with the shape, dtype and device of x; on a CPU without a copy."""
    if array.dtype == ml_dtypes.bfloat16:
        tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(array)
    n, c, *others = x.shape
    tensor = tensor.view(n, *others, c).movedim(-1, 1) if channels_last else tensor.view(x.shape)
    return tensor.to(x.device)


def _in_pinned_memory(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies from a GPU to page-locked memory, all at once. Not run on a GPU yet."""
    copies = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return copies
