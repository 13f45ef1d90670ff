"""The client for asyncio."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, SupportsIndex, TypeVar

import numpy as np
import numpy.typing as npt

from bngrad import _ops, _validation
from bngrad._balancing.resolver import check_targets
from bngrad._base_client import Caller
from bngrad._cancellation import Cancellation
from bngrad._credentials import Tls, Token, check_security
from bngrad._deadline import Deadline
from bngrad._errors import ClientClosedError, DeadlineExceededError
from bngrad._executor import DaemonThreads
from bngrad._requests.request import Call
from bngrad._results import (
    Array,
    BatchNormTrainingBackprop,
    FusedBatchNormGradGrad,
    FusedBatchNormGradV2,
    FusedBatchNormGradV3,
    ServerInfo,
)
from bngrad._validation import Transport

Result = TypeVar("Result")

_THREADS = 64
"""Calls in flight at once; more wait for one of these."""


class Client:
    """`bngrad.Client` to ``await``: the same methods, arguments, results and errors.

    One client serves any number of tasks. Whatever takes longer with the size of a tensor runs in threads, so that the
    event loop never stands still. A task that is cancelled cancels its call, and gets ``asyncio.CancelledError`` as
    usual; where the call has an ``out``, once no thread writes to it any more.
    """

    def __init__(
        self,
        target: str | Sequence[str],
        *,
        timeout: float = _validation.DEFAULT_TIMEOUT_S,
        transport: Transport = "auto",
        retries: bool = True,
        tls: Tls | bool = False,
        token: Token | None = None,
        insecure: bool = False,
        options: Iterable[_validation.ChannelOption] = (),
    ) -> None:
        """Connects to nothing yet, and may be called before there is an event loop.

        Args:
            target: The address of a server, or of several that share the calls: see `bngrad.Client`.
            timeout: How long calls may take that are given no timeout of their own, in seconds; ``math.inf`` for
                no limit.
            transport: How tensors travel: see `bngrad.Client`.
            retries: Whether calls that failed are repeated where that may help: see `bngrad.Client`.
            tls: Whether TCP connections are encrypted, and how: see `bngrad.Client`.
            token: What the server knows the caller by: see `bngrad.Client`. Functions are called in threads.
            insecure: Whether the token may be sent to other hosts without TLS.
            options: gRPC channel arguments, such as ``("grpc.keepalive_time_ms", 30_000)``.
        """
        targets = check_targets(target)
        self._target = target if isinstance(target, str) else targets
        self._timeout = _validation.check_timeout(timeout)
        self._caller = Caller(
            targets,
            _validation.check_transport(transport),
            _validation.check_retries(retries),
            options,
            check_security(targets, tls, token, insecure),
        )
        self._threads = DaemonThreads(_THREADS, "bngrad")

    async def fused_batch_norm_grad_v3(
        self,
        y_backprop: Any,
        x: Any,
        scale: Any,
        reserve_space_1: Any,
        reserve_space_2: Any,
        reserve_space_3: Any,
        epsilon: float = 0.0001,
        data_format: str = "NHWC",
        is_training: bool = True,
        name: str | None = None,
        *,
        reserve_space_2_kind: str = "variance",
        out: Array | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> FusedBatchNormGradV3:
        """Computes TensorFlow's ``FusedBatchNormGradV3``: see `bngrad.Client.fused_batch_norm_grad_v3`."""
        return await self._run(
            lambda: _ops.fused_batch_norm_grad_v3(
                y_backprop, x, scale, reserve_space_1, reserve_space_2, reserve_space_3,
                epsilon, data_format, is_training, reserve_space_2_kind, priority, out,
            ),
            timeout,
            writes=out is not None,
        )  # fmt: skip

    async def fused_batch_norm_grad_v2(
        self,
        y_backprop: Any,
        x: Any,
        scale: Any,
        reserve_space_1: Any,
        reserve_space_2: Any,
        epsilon: float = 0.0001,
        data_format: str = "NHWC",
        is_training: bool = True,
        name: str | None = None,
        *,
        reserve_space_2_kind: str = "variance",
        out: Array | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> FusedBatchNormGradV2:
        """Computes TensorFlow's ``FusedBatchNormGradV2``: see `bngrad.Client.fused_batch_norm_grad_v2`."""
        return await self._run(
            lambda: _ops.fused_batch_norm_grad_v2(
                y_backprop, x, scale, reserve_space_1, reserve_space_2,
                epsilon, data_format, is_training, reserve_space_2_kind, priority, out,
            ),
            timeout,
            writes=out is not None,
        )  # fmt: skip

    async def batch_norm_training_backprop(
        self,
        input_forward: Any,
        output_delta: Any,
        mean: Any,
        variance: Any,
        gamma: Any = None,
        *,
        epsilon: float,
        data_format: str = "NXC",
        out: Array | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> BatchNormTrainingBackprop:
        """Computes oneDNN's ``BatchNormTrainingBackprop``: see `bngrad.Client.batch_norm_training_backprop`."""
        return await self._run(
            lambda: _ops.batch_norm_training_backprop(
                input_forward, output_delta, mean, variance, gamma, epsilon, data_format, priority, out
            ),
            timeout,
            writes=out is not None,
        )  # fmt: skip

    async def fused_batch_norm_grad_grad(
        self,
        grad_x_backprop: Any,
        grad_scale_backprop: Any,
        grad_offset_backprop: Any,
        y_backprop: Any,
        x: Any,
        scale: Any,
        reserve_space_1: Any,
        reserve_space_2: Any,
        epsilon: float = 0.0001,
        data_format: str = "NHWC",
        is_training: bool = True,
        *,
        reserve_space_2_kind: str = "variance",
        out: tuple[Array | None, Array | None] | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> FusedBatchNormGradGrad:
        """Computes the second order: see `bngrad.Client.fused_batch_norm_grad_grad`."""
        return await self._run(
            lambda: _ops.fused_batch_norm_grad_grad(
                grad_x_backprop, grad_scale_backprop, grad_offset_backprop,
                y_backprop, x, scale, reserve_space_1, reserve_space_2,
                epsilon, data_format, is_training, reserve_space_2_kind, priority, out,
            ),
            timeout,
            writes=out is not None,
        )  # fmt: skip

    async def server_info(self, *, timeout: float | None = None) -> ServerInfo:
        """Asks the server what it is, what it computes on and what it accepts: see `bngrad.Client.server_info`."""
        return await self._in_thread(self._caller.server_info, timeout)

    async def empty(self, shape: SupportsIndex | Sequence[SupportsIndex], dtype: npt.DTypeLike = np.float32) -> Array:
        """Makes an array in memory that is shared with the server: see `bngrad.Client.empty`."""
        dimensions, kind = _validation.check_shape(shape), _validation.check_dtype(dtype)
        return await self._in_thread(lambda *limits: self._caller.empty(dimensions, kind, *limits), None)

    async def close(self) -> None:
        """Gives the connections up; calls in flight end with a `ClientClosedError`. Closing again does nothing."""
        self._caller.close()
        self._threads.shutdown()

    async def _run(self, make_call: Callable[[], Call[Result]], timeout: float | None, *, writes: bool) -> Result:
        return await self._in_thread(lambda *limits: self._caller.run(make_call(), *limits), timeout, writes=writes)

    async def _in_thread(
        self, what: Callable[[Deadline, Cancellation], Result], timeout: float | None, *, writes: bool = False
    ) -> Result:
        """Has a thread do something; one that ``writes`` to the caller's memory has ended when the caller goes on."""
        deadline = Deadline.after(self._timeout if timeout is None else _validation.check_timeout(timeout))
        cancellation = Cancellation()

        def run() -> Result:
            if not deadline.allows(0):
                raise DeadlineExceededError(f"{self!r} had too many calls for the timeout of {deadline.timeout} s")
            return what(deadline, cancellation)

        try:
            self._caller.check_open()
            # With the task's context, as asyncio.to_thread does: the trace goes on in the thread.
            context = contextvars.copy_context()
            future = self._threads.submit(context.run, run)
            try:
                return await asyncio.wrap_future(future)
            except asyncio.CancelledError:
                cancellation.cancel()
                if writes:
                    await asyncio.gather(asyncio.wrap_future(future), return_exceptions=True)
                raise
            finally:
                del future  # it has the call's error, whose frames would have it, until garbage is collected
        except ClientClosedError as error:
            raise ClientClosedError(f"{self!r} {error}") from error

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"bngrad.aio.Client({self._target!r})"
