"""The arguments of the ops that are not tensors, checked and in the form that the protocol has them."""

from __future__ import annotations

import ctypes
import functools
import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from bngrad._errors import FieldViolation, invalid_argument, is_encodable
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_wire.limits import MAX_PRIORITY

_RESERVE_SPACE_2_KINDS: Mapping[str, pb.ReserveSpace2Kind] = {
    "variance": pb.RESERVE_SPACE2_KIND_VARIANCE,
    "inverse_std": pb.RESERVE_SPACE2_KIND_INVERSE_STD,
}
_LONGEST_NAME = 64
"""Caches keep names, so none may be of any length."""
_REAL, _INTEGRAL = float | numbers.Real, int | numbers.Integral
"""With the usual type first: the abstract class alone takes five times as long to check."""


class TensorFlowAttributes(NamedTuple):
    """The attributes of TensorFlow's ops, as they were given."""

    epsilon: float
    data_format: str
    is_training: bool
    reserve_space_2_kind: str
    priority: int

    def checked(self) -> dict[str, Any]:
        """Returns the fields of the request.

        Raises:
            TypeError: One has the wrong type.
            InvalidArgumentError: One has a value that the protocol cannot express.
        """
        return _kept(_tensorflow_fields, self)


class OneDnnAttributes(NamedTuple):
    """The attributes of oneDNN's op, as they were given."""

    epsilon: float
    data_format: str
    variance_kind: str
    priority: int

    def checked(self) -> dict[str, Any]:
        """Returns the fields of the request; see `TensorFlowAttributes.checked`."""
        return _kept(_onednn_fields, self)


def _kept(fields: Callable[..., dict[str, Any]], attributes: tuple[Any, ...]) -> dict[str, Any]:
    """Returns the fields of attributes; the next calls, which mostly have the same, take them from a cache."""
    try:
        return dict(fields(*attributes))
    except TypeError:  # of a wrong type, which may not even have a hash
        checked: dict[str, Any] = inspect.unwrap(fields)(*attributes)
        return checked


@functools.lru_cache(maxsize=256, typed=True)
def _tensorflow_fields(
    epsilon: float, data_format: str, is_training: bool, reserve_space_2_kind: str, priority: int
) -> dict[str, Any]:
    if not isinstance(is_training, bool | np.bool_):
        raise TypeError(f"is_training must be a bool, not {is_training!r}")
    return {
        "epsilon": _epsilon(epsilon),
        "data_format": _data_format(data_format),
        "is_training": bool(is_training),
        "reserve_space_2_kind": _kind("reserve_space_2_kind", reserve_space_2_kind),
        **_priority(priority),
    }


@functools.lru_cache(maxsize=256, typed=True)
def _onednn_fields(epsilon: float, data_format: str, variance_kind: str, priority: int) -> dict[str, Any]:
    return {
        "epsilon": _epsilon(epsilon),
        "data_format": _data_format(data_format),
        "variance_kind": _kind("variance_kind", variance_kind),
        **_priority(priority),
    }


def _epsilon(epsilon: float) -> float:
    """Rounds epsilon to float32, the type of the attribute; protobuf would silently turn 1e39 into infinity."""
    if isinstance(epsilon, bool) or not isinstance(epsilon, _REAL):
        raise TypeError(f"epsilon must be a number, not {epsilon!r}")
    try:
        rounded = ctypes.c_float(float(epsilon)).value
    except OverflowError:  # An int too large for a float may also be too long to print.
        rounded = epsilon = math.inf
    if not math.isfinite(rounded):
        raise invalid_argument(FieldViolation("epsilon", f"epsilon must be finite in float32, not {epsilon}"))
    return rounded + 0.0  # never -0.0, which caches take for 0.0


def _data_format(data_format: str) -> str:
    if not isinstance(data_format, str):
        raise TypeError(f"data_format must be a str, not {data_format!r}")
    if not is_encodable(data_format) or len(data_format) > _LONGEST_NAME:
        has = repr(data_format) if len(data_format) <= _LONGEST_NAME else f"{len(data_format)} characters"
        description = f"data_format must be a name such as 'NHWC', not {has}"
        raise invalid_argument(FieldViolation("data_format", description))
    return data_format


def _kind(field: str, kind: str) -> pb.ReserveSpace2Kind:
    if not isinstance(kind, str):
        raise TypeError(f"{field} must be a str, not {kind!r}")
    if kind not in _RESERVE_SPACE_2_KINDS:
        names = " or ".join(f"{name!r}" for name in _RESERVE_SPACE_2_KINDS)
        raise invalid_argument(FieldViolation(field, f"{field} must be {names}, not {kind!r}"))
    return _RESERVE_SPACE_2_KINDS[kind]


def _priority(priority: int) -> dict[str, int]:
    """Returns the attribute; nothing for 0, the default."""
    if isinstance(priority, bool) or not isinstance(priority, _INTEGRAL):
        raise TypeError(f"priority must be an int, not {priority!r}")
    if abs(priority) > MAX_PRIORITY:
        has = priority if abs(priority) < 10**100 else "a number too long to print"
        description = f"priority must be from -{MAX_PRIORITY} to {MAX_PRIORITY}, not {has}"
        raise invalid_argument(FieldViolation("priority", description))
    return {"priority": int(priority)} if priority else {}
