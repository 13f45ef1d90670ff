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


def shape_for_client(x: Tensor, *, channels_last: bool) -> tuple[int, ...]:
    """Returns the four dimensions by which the client knows a tensor of shape (N, C, ...)."""
    n, c, *others = x.shape
    height, width = others if len(others) == 2 else (1, math.prod(others))
    return (n, height, width, c) if channels_last else (n, c, height, width)


def for_client(tensors: Sequence[Tensor], *, channels_last: bool) -> list[Array]:
    """Returns tensors of shape (N, C, ...) as NHWC or NCHW in the CPU's memory; copies only those that differ."""
    views = []
    for tensor in tensors:
        view = (tensor.movedim(1, -1) if channels_last else tensor).contiguous()
        views.append(view if view.dim() == 4 else view.view(shape_for_client(tensor, channels_last=channels_last)))
    if views[0].is_cuda:
        views = _in_pinned_memory(views)
    return list(map(_array, views))


def vector(values: Tensor) -> Array:
    """Returns values per channel as the client takes them."""
    return _array(values if values.dtype is torch.float32 else values.float())


def output_like(array: Array, x: Tensor) -> Tensor | None:
    """Returns page-locked memory for a result that goes to a GPU; otherwise None, so that the client makes an array."""
    return torch.empty(array.shape, dtype=x.dtype, pin_memory=True) if x.is_cuda else None


def from_client(array: Array, x: Tensor, *, channels_last: bool) -> Tensor:
    """Returns a result with the shape, dtype and device of x; on a CPU without a copy."""
    is_bfloat16 = x.dtype == torch.bfloat16
    tensor = torch.from_numpy(array.view(np.int16)).view(x.dtype) if is_bfloat16 else torch.from_numpy(array)
    if x.dim() != 4:
        n, c, *others = x.shape
        tensor = tensor.view((n, *others, c) if channels_last else x.shape)
    if channels_last:
        tensor = tensor.movedim(-1, 1)
    return tensor if x.is_cpu else tensor.to(x.device)


def _array(tensor: Tensor) -> Array:
    """Returns a view of a tensor in the CPU's memory; NumPy does not know PyTorch's bfloat16."""
    if tensor.dtype != torch.bfloat16:
        return tensor.numpy(force=True)
    is_plain = tensor.is_cpu and not tensor.is_neg()
    plain = tensor if is_plain else tensor.cpu().resolve_neg()
    return plain.view(torch.int16).numpy().view(ml_dtypes.bfloat16)  # integers need no gradient


def _in_pinned_memory(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies from a GPU to page-locked memory, all at once."""
    copies = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return copies
