"""Computes prepared requests by the CPU kernels in this process."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from bngrad._ahead.upload import Place
from bngrad._deadline import Cancellation, Deadline
from bngrad._errors import InvalidArgumentError
from bngrad._local import checks
from bngrad._requests.request import Attributes, OpSchema, PreparedRequest
from bngrad._results import Device, ServerInfo
from bngrad._shared_memory.pool import Pool
from bngrad.typing import Array, DataFormat
from bngrad_kernels.problem import Problem, address_of_array, problem_type
from bngrad_kernels.spec import Spec
from bngrad_wire import __version__

if TYPE_CHECKING:
    from bngrad_kernels.cpu.uncompiled.backend import EagerBackend

Result = TypeVar("Result")
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
            UnavailableError: Its kernel cannot be compiled, and NumPy would take too long: the second order of large
                tensors. Or NUMBA_CPU_NAME is no name.
        """
        checked, inputs, outputs = self._tensors(request)
        if checked.compute is not None:
            _compute(checked.compute, inputs, outputs)
        else:
            kind: Any = problem_type(checked.spec)
            with checks.available():
                _backend().run([kind(checked.spec, *inputs, *outputs)])
        for i, out in enumerate(request.out):
            if out is not None and out is not outputs[i]:
                np.copyto(out, outputs[i])
                outputs[i] = out
        fields = request.op.outputs
        while len(outputs) < len(fields):
            outputs.append(np.empty(0, np.float32))
        return request.result(dict(zip(fields, outputs, strict=True)))

    def compute_plain(self, op: OpSchema[Result], tensors: Sequence[Any], attributes: Attributes) -> Result | None:
        """Computes a call of the first order whose tensors are plain NumPy arrays, with half of the Python of `run`.

        Args:
            op: The op.
            tensors: One for each of the op's `tensors`, or None.
            attributes: The other arguments.

        Returns:
            None, and nothing is computed, for any other call, and one with wrong arguments: `run` says which.

        Raises:
            UnavailableError: As in `run`.
        """
        headers: list[checks.Header | None] = []
        for tensor in tensors:
            if tensor is not None and not _is_plain(tensor):
                return None
            headers.append(None if tensor is None else (tensor.dtype, tensor.shape))
        try:
            plain = checks.check_plain(_backend(), op, tuple(headers), *attributes)
        except (InvalidArgumentError, TypeError):
            return None
        if plain is None:
            return None
        spec = plain.spec
        outputs = [self._new(spec), *(np.empty(spec.channels, spec.stats_dtype) for _ in Problem.small_outputs)]
        empty = (np.empty(0, np.float32) for _ in op.outputs[len(outputs) :])
        result = op.result(*outputs, *empty)  # now, since the kernel leaves no Python in the caches
        _compute(plain.compute, [tensors[i] for i in plain.inputs], outputs)
        return result

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
            addresses: Those of `bngrad_kernels.cpu.records.FIRST_ORDER`, 0 for a scale of ones; reserve_space_2 is the
                inverse standard deviation.

        Returns:
            Whether the op's contract allows the call; if not, nothing is computed.

        Raises:
            UnavailableError: As in `run`.
        """
        compute = checks.check_shape(_backend(), dtype, shape, data_format, epsilon, is_training)
        if compute is not None:
            compute(*addresses)
        return compute is not None

    def server_info(self, deadline: Deadline, cancellation: Cancellation) -> ServerInfo:
        """Describes this process as a server with one CPU."""
        device = Device("cpu", _backend().description, "ready", restarts=0, memory_bytes=0)
        names = tuple(op.method.rpartition("/")[2] for op in checks.OPS)
        return ServerInfo(
            version=__version__, devices=(device,), ops=names, max_message_bytes=0, arena_bytes=0, requests=0,
            unread_connections=0, batch_sizes=(), stream_port=0, stream_host="", local_directory="", device_remark="",
            compiling=_backend().compiling,
        )  # fmt: skip

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

    def _tensors(self, request: PreparedRequest[Any]) -> tuple[checks.Checked, list[Array | None], list[Array]]:
        """Checks a request as a server does; returns what to compute, and the inputs and outputs of a problem."""
        arrays = {**request.large, **request.small}
        headers = [(field, (array.dtype, array.shape)) for field, array in arrays.items()]
        if (ignored := request.ignored) is not None:
            headers.append(("reserve_space_3", (ignored.dtype, ignored.shape)))
        checked = checks.check(_backend(), request.op, tuple(headers), tuple(request.attributes.items()))
        inputs = [
            array if array is None or array.flags.aligned else array.copy()
            for array in map(arrays.get, checks.inputs_of(request.op))
        ]
        outputs = [
            out if out is not None and out.flags.c_contiguous and out.flags.aligned else self._new(checked.spec)
            for out in request.out
        ]
        small_outputs = problem_type(checked.spec).small_outputs
        outputs += [np.empty(checked.spec.channels, checked.spec.stats_dtype) for _ in small_outputs]
        return checked, inputs, outputs

    def _new(self, spec: Spec) -> Array:
        if spec.tensor_nbytes < _POOLED_FROM_NBYTES:
            return np.empty(spec.shape, spec.dtype)
        return self._pool.empty(spec.shape, spec.dtype)


def _is_plain(tensor: object) -> bool:
    return type(tensor) is np.ndarray and tensor.flags.c_contiguous and tensor.flags.aligned


def _compute(compute: checks.Compute, inputs: Iterable[Array | None], outputs: Iterable[Array]) -> None:
    """Computes the arrays of a problem of the first order; None is a scale of ones."""
    y_backprop, x, *others = [0 if array is None else address_of_array(array) for array in inputs]
    x_backprop, *rest = map(address_of_array, outputs)
    compute(y_backprop, x, x_backprop, *others, *rest)


@functools.cache
def _backend() -> EagerBackend:
    """The backend of this process."""
    from bngrad_kernels.cpu.uncompiled.backend import EagerBackend  # noqa: PLC0415 - takes a tenth of a second to import

    return EagerBackend()


os.register_at_fork(after_in_child=_backend.cache_clear)  # other threads may hold its locks, and are not there
