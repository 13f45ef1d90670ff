"""What a call computes in this process: checked as a server checks it, and prepared for the CPU kernels."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from bngrad._errors import FieldViolation, InvalidArgumentError, UnavailableError
from bngrad._requests import ops
from bngrad._requests.attributes import OneDnnAttributes, TensorFlowAttributes
from bngrad._requests.request import OpSchema
from bngrad.typing import DataFormat
from bngrad_kernels import spec, validation
from bngrad_kernels.errors import DeviceUnavailableError
from bngrad_kernels.spec import ReserveSpace2Kind, Spec, TensorHeader
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_wire.limits import MAX_RANK

if TYPE_CHECKING:
    from bngrad_kernels.cpu import CpuBackend

Compute: TypeAlias = Callable[..., None]
"""Computes from addresses, see `bngrad_kernels.cpu.CpuBackend.bound_at`."""
Header: TypeAlias = tuple[np.dtype[Any], tuple[int, ...]]
"""The dtype and the shape of a tensor."""

_SPECS: dict[OpSchema[Any], Callable[..., Spec]] = {
    ops.V3: validation.fused_batch_norm_grad_v3_spec,
    ops.V2: validation.fused_batch_norm_grad_v2_spec,
    ops.TRAINING_BACKPROP: validation.batch_norm_training_backprop_spec,
    ops.GRAD_GRAD: validation.fused_batch_norm_grad_grad_spec,
}
OPS = tuple(_SPECS)
_INPUTS: dict[OpSchema[Any], tuple[str, ...]] = {
    ops.V3: ("y_backprop", "x", "scale", "reserve_space_1", "reserve_space_2"),
    ops.TRAINING_BACKPROP: ("output_delta", "input_forward", "gamma", "mean", "variance"),
}
"""The tensors in the order of a problem's inputs, where that is not the order of the op's tensors."""


class Checked(NamedTuple):
    """What to compute.

    Attributes:
        spec: The spec.
        compute: Computes it with less Python than a backend's ``run``; None for the second order, and where there is
            nothing to compute.
    """

    spec: Spec
    compute: Compute | None


class Plain(NamedTuple):
    """What to compute of a call whose tensors are plain NumPy arrays.

    Attributes:
        spec: The spec.
        compute: Computes it.
        inputs: Which of the op's tensors are the problem's inputs, in the order of these.
    """

    spec: Spec
    compute: Compute
    inputs: tuple[int, ...]


def inputs_of(op: OpSchema[Any]) -> list[str]:
    """The tensors of an op in the order of a problem's inputs."""
    return list(_INPUTS.get(op, op.tensors))


@functools.lru_cache(maxsize=1024)
def check(
    backend: CpuBackend,
    op: OpSchema[Any],
    tensors: tuple[tuple[str, Header], ...],
    attributes: tuple[tuple[str, Any], ...],
) -> Checked:
    """Checks a request.

    Raises:
        InvalidArgumentError: It breaks the op's contract, as a server says it.
        UnavailableError: As in `bngrad._local.kernels.LocalKernels.run`.
    """
    checked = _spec(op, tensors, attributes)
    if checked.order == 2 or not checked.tensor_nbytes:
        return Checked(checked, None)
    with available():
        return Checked(checked, backend.bound_at(checked))


@functools.lru_cache(maxsize=1024, typed=True)
def check_plain(
    backend: CpuBackend,
    op: OpSchema[Any],
    tensors: tuple[Header | None, ...],
    *attributes: Any,
) -> Plain | None:
    """Checks the arguments of a call, given the headers of its tensors and the fields of its attributes.

    Returns:
        None where `Checked` has no ``compute``.

    Raises:
        InvalidArgumentError: As in `check`.
        TypeError: A tensor is missing, or an attribute has the wrong type. Errors are not cached, nor such attributes.
        UnavailableError: As in `check`.
    """
    given = tuple((field, header) for field, header in zip(op.tensors, tensors, strict=True) if header is not None)
    kind = OneDnnAttributes if op is ops.TRAINING_BACKPROP else TensorFlowAttributes
    checked = check(backend, op, given, tuple(kind(*attributes).checked().items()))
    if checked.compute is None:
        return None
    return Plain(checked.spec, checked.compute, tuple(map(op.tensors.index, inputs_of(op))))


@functools.lru_cache(maxsize=1024)
def check_shape(
    backend: CpuBackend,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    data_format: DataFormat,
    epsilon: float,
    is_training: bool,
) -> Compute | None:
    """Returns what computes FusedBatchNormGradV3 for x of such a dtype and shape; None if the contract forbids it.

    Raises:
        UnavailableError: As in `check`.
    """
    large = _header(dtype, shape)
    per_channel = _header(np.dtype(np.float32), (shape[1 if data_format == "NCHW" else -1],))
    try:
        checked = validation.fused_batch_norm_grad_v3_spec(
            large, large, per_channel, per_channel, per_channel,
            epsilon=epsilon, data_format=data_format, is_training=is_training,
            reserve_space_2_kind=ReserveSpace2Kind.INVERSE_STD,
        )  # fmt: skip
    except spec.InvalidArgumentError:
        return None
    with available():
        return backend.bound_at(checked)


@contextlib.contextmanager
def available() -> Iterator[None]:
    """Raises an UnavailableError where a kernel is needed and cannot be compiled."""
    try:
        yield
    except DeviceUnavailableError as error:
        raise UnavailableError(str(error)) from error


def _spec(op: OpSchema[Any], tensors: tuple[tuple[str, Header], ...], attributes: tuple[tuple[str, Any], ...]) -> Spec:
    given = dict(attributes)
    given.pop("priority", None)  # nothing waits here
    kind = "variance_kind" if op is ops.TRAINING_BACKPROP else "reserve_space_2_kind"
    is_inverse = given[kind] == pb.RESERVE_SPACE2_KIND_INVERSE_STD
    given[kind] = ReserveSpace2Kind.INVERSE_STD if is_inverse else ReserveSpace2Kind.VARIANCE
    violations = [
        spec.FieldViolation(field, f"{field} must have at most {MAX_RANK} dimensions, not {len(shape)}")
        for field, (_, shape) in tensors
        if len(shape) > MAX_RANK
    ]
    try:
        if violations:
            raise spec.InvalidArgumentError(tuple(violations))
        return _SPECS[op](**{field: _header(*header) for field, header in tensors}, **given)
    except spec.InvalidArgumentError as error:
        found = [FieldViolation(violation.field, violation.description) for violation in error.violations]
        raise InvalidArgumentError(str(error), found) from None


def _header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> TensorHeader:
    return TensorHeader(dtype, shape, math.prod(shape) * dtype.itemsize)
