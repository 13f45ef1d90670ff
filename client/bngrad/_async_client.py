"""The client for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NoReturn, SupportsIndex, TypeVar, overload

import numpy as np
import numpy.typing as npt

from bngrad import _validation
from bngrad._ahead.tensor import AheadTensor
from bngrad._call_runner import CallRunner
from bngrad._credentials import Tls, Token
from bngrad._deadline import Cancellation, Deadline
from bngrad._errors import DeadlineExceededError
from bngrad._executor import DaemonExecutor
from bngrad._requests import ops
from bngrad._requests.arrays import as_array
from bngrad._requests.attributes import OneDnnAttributes, TensorFlowAttributes
from bngrad._requests.request import Attributes, OpSchema
from bngrad._results import (
    BatchNormTrainingBackprop,
    FusedBatchNormGradGrad,
    FusedBatchNormGradV2,
    FusedBatchNormGradV3,
    ServerInfo,
)
from bngrad.typing import (
    Array,
    DataFormat,
    DataFormat4D,
    OneDnnDataFormat,
    Output,
    ReserveSpace2Kind,
    Targets,
    Tensor,
    Transport,
)

Result = TypeVar("Result")
Scalar = TypeVar("Scalar", bound=np.generic)
Self = TypeVar("Self", bound="Client")

_THREADS = 64
"""The most calls in flight; further calls wait for one of these to end."""


class Client:
    """`bngrad.Client` for asyncio: the same methods, arguments, results and errors, to be awaited.

    One client serves any number of tasks. Work that grows with the size of the tensors runs in threads, so that the
    event loop is never blocked. A cancelled task cancels its call and gets ``asyncio.CancelledError`` as usual; if the
    call has an ``out``, only when no thread writes to it anymore.
    """

    def __init__(
        self,
        target: Targets,
        *,
        timeout: float = 60.0,
        transport: Transport = "auto",
        retries: bool = True,
        tls: Tls | bool = False,
        token: Token | None = None,
        insecure: bool = False,
        options: Iterable[tuple[str, Any]] = (),
        fallback: Literal["local"] | None = None,
    ) -> None:
        """Makes a client, which connects when it is first used; there need not be an event loop yet.

        Args:
            target: The address of a server, of several that share the calls, or a function that returns them and may
                block: see `bngrad.Client`.
            timeout: The timeout of calls that are given none of their own, in seconds; ``math.inf`` for no limit.
            transport: How tensors travel: see `bngrad.Client`.
            retries: Whether failed calls are repeated where that may help: see `bngrad.Client`.
            tls: Whether TCP connections are encrypted, and how: see `bngrad.Client`.
            token: What identifies the client to the server: see `bngrad.Client`. Functions are called in threads.
            insecure: Whether the token may be sent to other hosts without TLS.
            options: gRPC channel arguments, such as ``("grpc.keepalive_time_ms", 30_000)``.
            fallback: Whether calls that no server answers are computed in this process: see `bngrad.Client`.

        Raises:
            ModuleNotFoundError: Numba is needed and not installed: see `bngrad.Client`.
        """
        self._calls = CallRunner(
            "bngrad.aio.Client", target,
            timeout=timeout, transport=transport, retries=retries, tls=tls, token=token, insecure=insecure,
            options=options, fallback=fallback,
        )  # fmt: skip
        self._executor = DaemonExecutor(_THREADS, "bngrad")

    async def fused_batch_norm_grad_v3(
        self,
        y_backprop: Tensor,
        x: Tensor,
        scale: Tensor,
        reserve_space_1: Tensor,
        reserve_space_2: Tensor,
        reserve_space_3: Tensor | None,
        epsilon: float = 0.0001,
        data_format: DataFormat = "NHWC",
        is_training: bool = True,
        name: str | None = None,
        *,
        reserve_space_2_kind: ReserveSpace2Kind = "variance",
        out: Output | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> FusedBatchNormGradV3:
        """Computes TensorFlow's ``FusedBatchNormGradV3``: see `bngrad.Client.fused_batch_norm_grad_v3`."""
        tensors = (y_backprop, x, scale, reserve_space_1, reserve_space_2, reserve_space_3)
        attributes = TensorFlowAttributes(epsilon, data_format, is_training, reserve_space_2_kind, priority)
        return await self._run(ops.V3, tensors, attributes, out, timeout)

    async def fused_batch_norm_grad_v2(
        self,
        y_backprop: Tensor,
        x: Tensor,
        scale: Tensor,
        reserve_space_1: Tensor,
        reserve_space_2: Tensor,
        epsilon: float = 0.0001,
        data_format: DataFormat4D = "NHWC",
        is_training: bool = True,
        name: str | None = None,
        *,
        reserve_space_2_kind: ReserveSpace2Kind = "variance",
        out: Output | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> FusedBatchNormGradV2:
        """Computes TensorFlow's ``FusedBatchNormGradV2``: see `bngrad.Client.fused_batch_norm_grad_v2`."""
        tensors = (y_backprop, x, scale, reserve_space_1, reserve_space_2)
        attributes = TensorFlowAttributes(epsilon, data_format, is_training, reserve_space_2_kind, priority)
        return await self._run(ops.V2, tensors, attributes, out, timeout)

    async def batch_norm_training_backprop(
        self,
        input_forward: Tensor,
        output_delta: Tensor,
        mean: Tensor,
        variance: Tensor,
        gamma: Tensor | None = None,
        *,
        epsilon: float,
        data_format: OneDnnDataFormat = "NXC",
        variance_kind: ReserveSpace2Kind = "variance",
        out: Output | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> BatchNormTrainingBackprop:
        """Computes oneDNN's ``BatchNormTrainingBackprop``: see `bngrad.Client.batch_norm_training_backprop`."""
        tensors = (input_forward, output_delta, mean, variance, gamma)
        attributes = OneDnnAttributes(epsilon, data_format, variance_kind, priority)
        return await self._run(ops.TRAINING_BACKPROP, tensors, attributes, out, timeout)

    async def fused_batch_norm_grad_grad(
        self,
        grad_x_backprop: Tensor,
        grad_scale_backprop: Tensor,
        grad_offset_backprop: Tensor,
        y_backprop: Tensor,
        x: Tensor,
        scale: Tensor,
        reserve_space_1: Tensor,
        reserve_space_2: Tensor,
        epsilon: float = 0.0001,
        data_format: DataFormat = "NHWC",
        is_training: bool = True,
        *,
        reserve_space_2_kind: ReserveSpace2Kind = "variance",
        out: tuple[Output | None, Output | None] | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> FusedBatchNormGradGrad:
        """Computes the second order: see `bngrad.Client.fused_batch_norm_grad_grad`."""
        tensors = (
            grad_x_backprop, grad_scale_backprop, grad_offset_backprop,
            y_backprop, x, scale, reserve_space_1, reserve_space_2,
        )  # fmt: skip
        attributes = TensorFlowAttributes(epsilon, data_format, is_training, reserve_space_2_kind, priority)
        return await self._run(ops.GRAD_GRAD, tensors, attributes, out, timeout)

    async def server_info(self, *, timeout: float | None = None) -> ServerInfo:
        """Asks the server for its version, devices, ops and limits: see `bngrad.Client.server_info`."""
        return await self._in_thread(self._calls.server_info, timeout)

    @overload
    async def empty(self, shape: SupportsIndex | Sequence[SupportsIndex]) -> npt.NDArray[np.float32]: ...

    @overload
    async def empty(
        self, shape: SupportsIndex | Sequence[SupportsIndex], dtype: type[Scalar] | np.dtype[Scalar]
    ) -> npt.NDArray[Scalar]: ...

    @overload
    async def empty(self, shape: SupportsIndex | Sequence[SupportsIndex], dtype: npt.DTypeLike) -> Array: ...

    async def empty(self, shape: SupportsIndex | Sequence[SupportsIndex], dtype: npt.DTypeLike = np.float32) -> Array:
        """Makes an array in memory shared with the server: see `bngrad.Client.empty`."""
        dimensions, kind = _validation.check_shape(shape), _validation.check_dtype(dtype)
        return await self._in_thread(lambda *limits: self._calls.empty(dimensions, kind, *limits), None)

    async def send_ahead(self, x: Tensor) -> AheadTensor:
        """Begins to send a tensor to a server in the background: see `bngrad.Client.send_ahead`."""
        return await self._in_thread(lambda *_: self._calls.send_ahead(as_array("x", x)), None)

    @property
    def fallback_calls(self) -> int:
        """How many calls were computed in this process because no server answered: see `bngrad.Client`."""
        return self._calls.fallback_calls

    async def close(self) -> None:
        """Closes the connections; calls in flight end with a `ClientClosedError`. Closing again does nothing."""
        self._calls.close()
        self._executor.shutdown()

    async def _run(
        self, op: OpSchema[Result], tensors: Sequence[Any], attributes: Attributes, out: Any, timeout: float | None
    ) -> Result:
        def run(deadline: Deadline, cancellation: Cancellation) -> Result:
            return self._calls.run(op.prepare(tensors, attributes, out), deadline, cancellation)

        return await self._in_thread(run, timeout, writes=out is not None)

    async def _in_thread(
        self, function: Callable[[Deadline, Cancellation], Result], timeout: float | None, *, writes: bool = False
    ) -> Result:
        """Runs a function in a thread; if it ``writes`` to the caller's memory, a cancelled task waits for its end."""
        loop = asyncio.get_running_loop()  # another library's has no call
        deadline, cancellation = self._calls.deadline(timeout), Cancellation()

        def run() -> Result:
            if not deadline.allows(0):
                raise DeadlineExceededError(f"{self!r} had too many calls for the timeout of {deadline.timeout} s")
            return function(deadline, cancellation)

        self._calls.check_open()
        # With the task's context, as asyncio.to_thread does, so that the trace goes on in the thread.
        try:
            future = self._executor.submit(contextvars.copy_context().run, run)
        except RuntimeError:
            self._calls.check_open()  # another thread may have closed the client just now
            raise
        try:
            return await asyncio.wrap_future(future, loop=loop)
        except asyncio.CancelledError:
            cancellation.cancel()
            if writes:
                await _ended(asyncio.wrap_future(future, loop=loop))
            raise
        finally:
            del future  # breaks the cycle of the future, its error and this frame

    def __reduce__(self) -> NoReturn:
        self._calls.__reduce__()  # also for a shallow copy, which would be closed with the client

    async def __aenter__(self: Self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return self._calls.name


async def _ended(future: asyncio.Future[Any]) -> None:
    """Waits until a future is done, also if the task is cancelled again meanwhile."""
    while not future.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([future])
    if not future.cancelled():
        future.exception()  # or asyncio would log that no one asked for it
