"""The client for asyncio."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from types import TracebackType
from typing import Any, TypeVar

import grpc

from bngrad import _channel, _ops
from bngrad._errors import ClientClosedError, from_rpc_error
from bngrad._results import BatchNormTrainingBackprop, FusedBatchNormGradV2, FusedBatchNormGradV3, ServerInfo

Result = TypeVar("Result")


class Client:
    """`bngrad.Client` to ``await``: the same methods, arguments, results and errors.

    One client serves any number of tasks of one event loop, over one connection. A task that is cancelled cancels
    its call, and gets ``asyncio.CancelledError`` as usual.
    """

    def __init__(
        self,
        target: str,
        *,
        timeout: float = _channel.DEFAULT_TIMEOUT_S,
        options: Iterable[_channel.ChannelOption] = (),
    ) -> None:
        """Connects to nothing yet, and may be called before there is an event loop.

        Args:
            target: ``HOST:PORT``, ``unix:PATH`` or any other gRPC target.
            timeout: How long calls may take that are given no timeout of their own, in seconds; ``math.inf`` for
                no limit.
            options: gRPC channel arguments, such as ``("grpc.keepalive_time_ms", 30_000)``.
        """
        self._target = _channel.check_target(target)
        self._timeout = _channel.check_timeout(timeout)
        self._options = _channel.channel_options(options)
        self._channel: grpc.aio.Channel | None = None
        self._closed = False

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
        timeout: float | None = None,
    ) -> FusedBatchNormGradV3:
        """Computes TensorFlow's ``FusedBatchNormGradV3``: see `bngrad.Client.fused_batch_norm_grad_v3`."""
        return await self._run(
            _ops.fused_batch_norm_grad_v3(
                y_backprop, x, scale, reserve_space_1, reserve_space_2, reserve_space_3,
                epsilon, data_format, is_training, reserve_space_2_kind,
            ),
            timeout,
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
        timeout: float | None = None,
    ) -> FusedBatchNormGradV2:
        """Computes TensorFlow's ``FusedBatchNormGradV2``: see `bngrad.Client.fused_batch_norm_grad_v2`."""
        return await self._run(
            _ops.fused_batch_norm_grad_v2(
                y_backprop, x, scale, reserve_space_1, reserve_space_2,
                epsilon, data_format, is_training, reserve_space_2_kind,
            ),
            timeout,
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
        timeout: float | None = None,
    ) -> BatchNormTrainingBackprop:
        """Computes oneDNN's ``BatchNormTrainingBackprop``: see `bngrad.Client.batch_norm_training_backprop`."""
        return await self._run(
            _ops.batch_norm_training_backprop(
                input_forward, output_delta, mean, variance, gamma, epsilon, data_format
            ),
            timeout,
        )  # fmt: skip

    async def server_info(self, *, timeout: float | None = None) -> ServerInfo:
        """Asks the server what it is, what it computes on and what it accepts: see `bngrad.Client.server_info`."""
        return await self._run(_ops.server_info(), timeout)

    async def close(self) -> None:
        """Gives the connection up; calls in flight end with a `ClientClosedError`. Closing again does nothing."""
        self._closed = True
        if self._channel is not None:
            await self._channel.close()

    async def _run(self, call: _ops.Call[Result], timeout: float | None) -> Result:
        seconds = self._timeout if timeout is None else _channel.check_timeout(timeout)
        if self._closed:
            raise ClientClosedError(f"{self!r} is closed")
        if self._channel is None:
            # Not earlier: a channel belongs to the event loop that runs when it is made.
            self._channel = grpc.aio.insecure_channel(self._target, self._options)
        method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(call.method)
        try:
            response = await method(call.request, timeout=_channel.grpc_timeout(seconds))
        except grpc.RpcError as error:
            raise from_rpc_error(error, self._target, seconds) from error
        except asyncio.CancelledError as error:
            if self._closed and not _is_cancelled():
                raise ClientClosedError(f"{self!r} was closed during the call") from error
            raise
        return call.read(response)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"bngrad.aio.Client({self._target!r})"


def _is_cancelled() -> bool:
    """Whether somebody cancelled the running task; before Python 3.11, which cannot tell, that is assumed."""
    task = asyncio.current_task()
    return sys.version_info < (3, 11) or task is None or task.cancelling() > 0
