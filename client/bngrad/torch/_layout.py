"""Tensors of PyTorch as the client sends them: 4-D, in C order, in the CPU's memory; and back."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from bngrad.typing import Array

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""PyTorch's memory formats with the channels last, by the number of dimensions."""
_LAST = {2: (0, 1), 3: (0, 2, 1), 4: (0, 2, 3, 1), 5: (0, 2, 3, 4, 1)}
_SECOND = {2: (0, 1), 3: (0, 2, 1), 4: (0, 3, 1, 2), 5: (0, 4, 1, 2, 3)}
"""The axes that move the channels from second to last, and back, by the number of dimensions."""


def has_channels_last(x: Tensor) -> bool:
    """Returns whether the channels are next to each other in memory, as in ``torch.channels_last`` and in 2-D."""
    if x.dim() == 2:
        return True
    if x.is_contiguous():
        return False
    if (memory_format := CHANNELS_LAST.get(x.dim())) is not None:
        return x.is_contiguous(memory_format=memory_format)
    return x.movedim(1, -1).is_contiguous()


def is_as_stored(x: Tensor) -> bool:
    """Returns whether a tensor's memory holds its values: it has memory, and no bit says that they are negated."""
    return not (x.is_neg() or x._is_zerotensor())


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
    if channels_last:
        ordered = [each if has_channels_last(each) else _with_channels_last(each) for each in tensors]
    else:
        ordered = [each.contiguous() for each in tensors]
    if ordered[0].is_cuda:
        ordered = _in_pinned_memory(ordered)
    arrays = list(map(_array, ordered))
    if channels_last:
        arrays = [array.transpose(_LAST[array.ndim]) for array in arrays]
    if arrays[0].ndim == 4:
        return arrays
    shape = shape_for_client(tensors[0], channels_last=channels_last)
    return [array.reshape(shape) for array in arrays]


def vector(values: Tensor) -> Array:
    """Returns values per channel as the client takes them."""
    return _array(values if values.dtype is torch.float32 else values.float())


def copied_vector(values: Tensor) -> Array:
    """Does as `vector`, but never returns a view: PyTorch refuses to resize memory that NumPy has seen."""
    if values.dtype is torch.float32 and values.is_cpu and values.is_contiguous() and is_as_stored(values):
        # With cold caches, clone() takes twice as long.
        return np.frombuffer(ctypes.string_at(values.data_ptr(), values.nbytes), np.float32)
    return vector(values.clone())


def output_like(array: Array, x: Tensor) -> Tensor | None:
    """Returns page-locked memory for a result that goes to a GPU; otherwise None, so that the client makes an array."""
    return torch.empty(array.shape, dtype=x.dtype, device="cpu", pin_memory=True) if x.is_cuda else None


def from_client(array: Array, x: Tensor, *, channels_last: bool) -> Tensor:
    """Returns a result with the shape, dtype and device of x; on a CPU without a copy."""
    if x.dim() != 4:
        n, c, *others = x.shape
        array = array.reshape((n, *others, c) if channels_last else x.shape)
    if channels_last:
        array = array.transpose(_SECOND[x.dim()])
    is_bfloat16 = x.dtype is torch.bfloat16
    tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if is_bfloat16 else torch.from_numpy(array)
    return tensor if x.is_cpu else tensor.to(x.device)


def _with_channels_last(tensor: Tensor) -> Tensor:
    return tensor.movedim(1, -1).contiguous().movedim(-1, 1)


def _array(tensor: Tensor) -> Array:
    """Returns a view of a tensor in the CPU's memory; NumPy does not know PyTorch's bfloat16."""
    if tensor._is_zerotensor():  # it has no memory
        tensor = tensor.clone()
    if tensor.requires_grad or tensor.is_neg() or not tensor.is_cpu:
        tensor = tensor.detach().cpu().resolve_neg()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _in_pinned_memory(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies from a GPU to page-locked memory, all at once."""
    copies = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return copies
