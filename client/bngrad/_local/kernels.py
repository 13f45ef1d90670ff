"""Computes prepared requests by the CPU kernels in this process."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from bngrad._ahead.upload import Place
from bngrad._deadline import Cancellation, Deadline
from bngrad._errors import FieldViolation, InvalidArgumentError, UnavailableError
from bngrad._requests import ops
from bngrad._requests.request import OpSchema, PreparedRequest
from bngrad._results import Device, ServerInfo
from bngrad._shared_memory.pool import Pool
from bngrad.typing import Array, DataFormat
from bngrad_kernels import spec, validation
from bngrad_kernels.errors import DeviceUnavailableError
from bngrad_kernels.problem import GradGradProblem, Problem
from bngrad_kernels.spec import ReserveSpace2Kind, Spec, TensorHeader
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_wire import __version__
from bngrad_wire.limits import MAX_RANK

if TYPE_CHECKING:
    from bngrad_kernels.cpu import CpuBackend

Result = TypeVar("Result")
_Header: TypeAlias = tuple[str, np.dtype[Any], tuple[int, ...]]

_SPECS: dict[OpSchema[Any], Callable[..., Spec]] = {
    ops.V3: validation.fused_batch_norm_grad_v3_spec,
    ops.V2: validation.fused_batch_norm_grad_v2_spec,
    ops.TRAINING_BACKPROP: validation.batch_norm_training_backprop_spec,
    ops.GRAD_GRAD: validation.fused_batch_norm_grad_grad_spec,
}
_INPUTS: dict[OpSchema[Any], tuple[str, ...]] = {
    ops.V3: ("y_backprop", "x", "scale", "reserve_space_1", "reserve_space_2"),
    ops.TRAINING_BACKPROP: ("output_delta", "input_forward", "gamma", "mean", "variance"),
}
"""The tensors in the order of a problem's inputs, where that is not the order of the op's tensors."""
_POOLED_FROM_NBYTES = 1 << 16
"""Larger outputs come from the pool: fresh pages cost more than the kernel that fills them."""


class LocalKernels:
    """Makes calls as `bngrad._transports.selector.TransportSelector` does, but computes them itself.

    Deadlines and cancellations end no call: a kernel that has begun runs to its end.

    Attributes:
        has_answered: True, since nothing must be reached.
        is_remote: False.
        load: None: it is not reported.
    """

    has_answered = True
    is_remote = False
    load = None

    def __init__(self) -> None:
        """Loads and compiles nothing yet.

        Raises:
            ModuleNotFoundError: Numba, which compiles the kernels, is not installed.
        """
        if importlib.util.find_spec("numba") is None:
            raise ModuleNotFoundError(
                "to compute in this process needs Numba: pip install '.[local]' in a checkout of bngrad", name="numba"
            )
        self._pool = Pool(None)

    def run(self, request: PreparedRequest[Result], deadline: Deadline, cancellation: Cancellation) -> Result:
        """Computes a call.

        Raises:
            InvalidArgumentError: The request breaks the op's contract.
            UnavailableError: The kernel cannot be compiled.
        """
        (checked, bound), inputs, outputs = self._tensors(request)
        if bound is not None:
            y_backprop, x, *others = map(_address, inputs)
            bound(y_backprop, x, _address(outputs[0]), *others, *map(_address, outputs[1:]))
        else:
            kind: Any = GradGradProblem if checked.order == 2 else Problem
            with _available():
                _backend().run([kind(checked, *inputs, *outputs)])
        for i, out in enumerate(request.out):
            if out is not None and out is not outputs[i]:
                np.copyto(out, outputs[i])
                outputs[i] = out
        fields = request.op.outputs
        while len(outputs) < len(fields):
            outputs.append(np.empty(0, np.float32))
        return request.result(dict(zip(fields, outputs, strict=True)))

    def gradients_at(
        self,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        data_format: DataFormat,
        epsilon: float,
        is_training: bool,
        *addresses: int,
    ) -> bool:
        """Computes FusedBatchNormGradV3 from the addresses of its tensors, with less Python than `run`.

        Args:
            dtype: The dtype of y_backprop and x; the tensors per channel are float32.
            shape: The shape of y_backprop and x, which has no 0.
            data_format: What its dimensions mean.
            epsilon: Added to the variance.
            is_training: Whether the mean and the variance depend on x.
            addresses: Those of `bngrad_kernels.cpu.backend.FIRST_ORDER`, 0 for a scale of ones; reserve_space_2 is the
                inverse standard deviation.

        Returns:
            Whether the op's contract allows the call; if not, nothing is computed.

        Raises:
            UnavailableError: As in `run`.
        """
        run = _bound_at(_backend(), dtype, shape, data_format, epsilon, is_training)
        if run is not None:
            run(*addresses)
        return run is not None

    def server_info(self, deadline: Deadline, cancellation: Cancellation) -> ServerInfo:
        """Describes this process as a server with one CPU."""
        device = Device("cpu", _backend().description, "ready", 0, 0)
        names = tuple(op.method.rpartition("/")[2] for op in _SPECS)
        return ServerInfo(__version__, (device,), names, 0, 0, 0, (), 0, "", "", "", ())

    def empty(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], deadline: Deadline, cancellation: Cancellation
    ) -> Array:
        """Makes an array in memory of this process."""
        return self._pool.empty(shape, dtype)

    def send_ahead(
        self, tensor: Array | None, forget: Sequence[bytes], deadline: Deadline, cancellation: Cancellation
    ) -> Place | None:
        """Sends nothing, since calls have the tensor here."""
        return None

    def copy_to_gpu(self, copy: Array, deadline: Deadline, cancellation: Cancellation) -> bytes:
        """Copies nothing, since there is no GPU."""
        return b""

    def close(self) -> None:
        """Releases the memory that no array uses."""
        self._pool.close()

    def _tensors(self, request: PreparedRequest[Any]) -> tuple[_Checked, list[Array | None], list[Array]]:
        """Checks a request as a server does; returns what to compute, and the inputs and outputs of a problem."""
        arrays = {**request.large, **request.small}
        headers = [(field, array.dtype, array.shape) for field, array in arrays.items()]
        if request.ignored is not None:
            headers.append(("reserve_space_3", request.ignored.dtype, request.ignored.shape))
        found = _checked(_backend(), request.op, tuple(headers), tuple(request.attributes.items()))
        checked = found.spec
        inputs = [
            array if array is None or array.flags.aligned else array.copy()
            for array in map(arrays.get, _INPUTS.get(request.op, request.op.tensors))
        ]
        outputs = [
            out if out is not None and out.flags.c_contiguous and out.flags.aligned else self._new(checked)
            for out in request.out
        ]
        small_outputs = GradGradProblem.small_outputs if checked.order == 2 else Problem.small_outputs
        outputs += [np.empty(checked.channels, checked.stats_dtype) for _ in small_outputs]
        return found, inputs, outputs

    def _new(self, checked: Spec) -> Array:
        if checked.tensor_nbytes < _POOLED_FROM_NBYTES:
            return np.empty(checked.shape, checked.dtype)
        return self._pool.empty(checked.shape, checked.dtype)


class _Checked(NamedTuple):
    """What to compute.

    Attributes:
        spec: The spec.
        bound: Computes it from addresses, see `bngrad_kernels.cpu.CpuBackend.bound_at`, with less Python than ``run``;
            None for the second order, and where there is nothing to compute.
    """

    spec: Spec
    bound: Callable[..., None] | None


@functools.lru_cache(maxsize=1024)
def _checked(
    backend: CpuBackend, op: OpSchema[Any], tensors: tuple[_Header, ...], attributes: tuple[tuple[str, Any], ...]
) -> _Checked:
    """Checks a request; raises an InvalidArgumentError with a server's words."""
    checked = _spec(op, tensors, attributes)
    if checked.order == 2 or not checked.tensor_nbytes:
        return _Checked(checked, None)
    with _available():
        return _Checked(checked, backend.bound_at(checked))


def _spec(op: OpSchema[Any], tensors: tuple[_Header, ...], attributes: tuple[tuple[str, Any], ...]) -> Spec:
    given = dict(attributes)
    given.pop("priority", None)  # nothing waits here
    kind = "variance_kind" if op is ops.TRAINING_BACKPROP else "reserve_space_2_kind"
    is_inverse = given[kind] == pb.RESERVE_SPACE2_KIND_INVERSE_STD
    given[kind] = ReserveSpace2Kind.INVERSE_STD if is_inverse else ReserveSpace2Kind.VARIANCE
    violations = [
        spec.FieldViolation(field, f"{field} must have at most {MAX_RANK} dimensions, not {len(shape)}")
        for field, _, shape in tensors
        if len(shape) > MAX_RANK
    ]
    try:
        if violations:
            raise spec.InvalidArgumentError(tuple(violations))
        return _SPECS[op](**{field: _header(dtype, shape) for field, dtype, shape in tensors}, **given)
    except spec.InvalidArgumentError as error:
        found = [FieldViolation(violation.field, violation.description) for violation in error.violations]
        raise InvalidArgumentError(str(error), found) from None


@functools.lru_cache(maxsize=1024)
def _bound_at(
    backend: CpuBackend,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    data_format: DataFormat,
    epsilon: float,
    is_training: bool,
) -> Callable[..., None] | None:
    """Returns what computes such problems wherever they are; None if the op's contract does not allow them."""
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
    with _available():
        return backend.bound_at(checked)


def _address(array: Array | None) -> int:
    """Returns where an array lies; 0 for a scale of ones."""
    address: int = 0 if array is None else array.__array_interface__["data"][0]
    return address


def _header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> TensorHeader:
    return TensorHeader(dtype, shape, math.prod(shape) * dtype.itemsize)


@contextlib.contextmanager
def _available() -> Iterator[None]:
    try:
        yield
    except DeviceUnavailableError as error:
        raise UnavailableError(str(error)) from error


@functools.cache
def _backend() -> CpuBackend:
    """The backend of this process."""
    from bngrad_kernels.cpu import CpuBackend  # noqa: PLC0415 - takes a tenth of a second to import

    return CpuBackend()


os.register_at_fork(after_in_child=_backend.cache_clear)  # other threads may hold its locks, and are not there
