"""Converts tensors of other libraries to NumPy arrays, without a copy where possible."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from bngrad._ahead.tensor import AheadTensor, array_of
from bngrad._errors import FieldViolation, InvalidArgumentError, invalid_argument
from bngrad.typing import Array

_HOST_DEVICE_TYPES = frozenset({1, 3, 11, 13})
"""DLPack's device types that the CPU can read: its own memory, and the pinned and managed memory of CUDA and ROCm."""


def as_arrays(tensors: Mapping[str, Any]) -> dict[str, Array]:
    """Converts several arguments.

    Raises:
        InvalidArgumentError: Names every argument that is not an array in the CPU's memory.
    """
    arrays: dict[str, Array] = {}
    violations: list[FieldViolation] = []
    for field, value in tensors.items():
        try:
            arrays[field] = as_array(field, value)
        except InvalidArgumentError as error:
            violations += error.violations
    if violations:
        raise invalid_argument(*violations)
    return arrays


def as_array(field: str, value: Any) -> Array:
    """Returns a view of a tensor if possible, else a copy.

    Args:
        field: The argument's name, for errors.
        value: A NumPy array, a tensor of PyTorch, TensorFlow or JAX, a handle of one that was sent ahead, anything else
            that has ``__dlpack__`` or ``__array__``, or numbers in (nested) Python sequences, which become float32 as
            in TensorFlow.

    Raises:
        InvalidArgumentError: It is none of these, or it is on a device other than the CPU.
    """
    if type(value) is np.ndarray:  # as most are; what follows takes long with cold caches
        return value
    if value is None:
        raise invalid_argument(FieldViolation(field, f"{field} must be an array, not None"))
    if isinstance(value, np.ndarray):
        _check_mask(field, value, "fill")
        return np.asarray(value)
    if isinstance(value, AheadTensor):
        return array_of(field, value)
    try:
        device = _foreign_device(value)
        if device is None:
            return _from_host(value)
    except Exception as error:  # Other libraries may raise anything; say which argument it was.
        description = f"{field} must be an array, but converting the {_type_name(value)} failed: {error}"
        raise invalid_argument(FieldViolation(field, description)) from error
    description = f"{field} must be in the CPU's memory, but the {_type_name(value)} is on {device}: copy it first"
    raise invalid_argument(FieldViolation(field, description))


def as_output(field: str, value: Any) -> Array | None:
    """Returns a NumPy array as it is, and a view of a PyTorch tensor; None for None.

    Raises:
        TypeError: It is none of these.
        InvalidArgumentError: The array has masked elements, or the tensor cannot be written to as memory of the CPU.
    """
    if value is None:
        return None
    if isinstance(value, np.ndarray):
        _check_mask(field, value, "unmask")
        return value
    if not _is_torch(value):
        raise TypeError(f"{field} must be a NumPy array or a PyTorch tensor, not {type(value).__name__}")
    if value.requires_grad or value.is_neg():
        has = "requires one" if value.requires_grad else "is"
        description = f"{field} must neither require a gradient nor be a negated view, but {has}"
        raise invalid_argument(FieldViolation(field, description))
    return as_array(field, value)


def _check_mask(field: str, array: Array, remedy: str) -> None:
    if isinstance(array, np.ma.MaskedArray) and np.ma.is_masked(array):
        masked = np.ma.getmaskarray(array).sum()
        description = f"{field} must have no masked elements, but has {masked}: {remedy} them first"
        raise invalid_argument(FieldViolation(field, description))


def _foreign_device(value: Any) -> str | None:
    """Returns the device of a tensor if the CPU cannot read its memory."""
    if _is_torch(value):
        return None if value.device.type == "cpu" else f"device {value.device}"
    if hasattr(value, "__dlpack_device__"):
        kind, number = value.__dlpack_device__()
        return None if int(kind) in _HOST_DEVICE_TYPES else f"device {number} of DLPack type {int(kind)}"
    # Numba's device arrays have no DLPack, and NumPy would silently copy them from the GPU.
    return "a CUDA device" if hasattr(value, "__cuda_array_interface__") else None


def _from_host(value: Any) -> Array:
    if _is_torch(value):
        return _from_torch(value)
    # Prefer __array__ of TensorFlow and JAX: it knows bfloat16, which np.from_dlpack does not.
    if hasattr(value, "__dlpack__") and not hasattr(value, "__array__"):
        return np.from_dlpack(value)
    array = np.asarray(value)
    # NumPy makes float64 and int64 of Python's numbers; TensorFlow makes float32.
    if isinstance(value, list | tuple) and array.dtype in (np.float64, np.int64):
        return array.astype(np.float32)
    return array


def _from_torch(tensor: Any) -> Array:
    """Returns a view; NumPy reads neither tensors that require a gradient nor bfloat16."""
    torch = sys.modules["torch"]
    plain = tensor.detach().resolve_neg()
    if plain.dtype == torch.bfloat16:
        return np.asarray(plain.view(torch.int16)).view(ml_dtypes.bfloat16)
    return np.asarray(plain)


def _is_torch(value: Any) -> bool:
    """Returns whether it is a tensor of PyTorch; does not import PyTorch, since a caller with a tensor has."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, getattr(torch, "Tensor", ()))


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
