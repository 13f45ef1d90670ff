"""The client for threads."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any, TypeVar

import grpc

from bngrad import _channel, _ops
from bngrad._errors import ClientClosedError, from_rpc_error
from bngrad._results import BatchNormTrainingBackprop, FusedBatchNormGradV2, FusedBatchNormGradV3, ServerInfo

Result = TypeVar("Result")


class Client:
    """Has gradients of fused batch normalisation computed by a server.

    One client serves any number of threads, over one connection. It need not be up when the client is made: the
    connection is opened by the first call, and again after it was lost.

    Tensors may be NumPy arrays of any memory layout and byte order, tensors of PyTorch, TensorFlow or JAX in the
    CPU's memory, anything else with ``__dlpack__`` or ``__array__``, or numbers in (nested) Python sequences, which
    become float32. Results are new NumPy arrays, which may be written to; bfloat16 is ``ml_dtypes.bfloat16``.

    In the docstrings, C is the number of channels. Every call may raise, beside what it names itself:

    * `bngrad.InvalidArgumentError`: the request breaks the op's contract; ``violations`` names each argument.
    * `bngrad.DeadlineExceededError`: no answer came within the timeout.
    * `bngrad.UnavailableError`: nobody answers at the target, or the server is stopping.
    * `bngrad.ResourceExhaustedError`: the request is larger than the server's memory for requests.
    * `bngrad.InternalError`: the server failed.
    * `bngrad.ClientClosedError`: the client was closed.
    * TypeError: an argument that is no tensor has the wrong type.
    """

    def __init__(
        self,
        target: str,
        *,
        timeout: float = _channel.DEFAULT_TIMEOUT_S,
        options: Iterable[_channel.ChannelOption] = (),
    ) -> None:
        """Connects to nothing yet.

        Args:
            target: ``HOST:PORT``, ``unix:PATH`` or any other gRPC target.
            timeout: How long calls may take that are given no timeout of their own, in seconds; ``math.inf`` for
                no limit.
            options: gRPC channel arguments, such as ``("grpc.keepalive_time_ms", 30_000)``.
        """
        self._target = _channel.check_target(target)
        self._timeout = _channel.check_timeout(timeout)
        self._channel = grpc.insecure_channel(target, _channel.channel_options(options))
        self._closed = False

    def fused_batch_norm_grad_v3(
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
        """Computes TensorFlow's ``FusedBatchNormGradV3``, with the arguments of ``tf.raw_ops``.

        With ``xc = x - reserve_space_1``, ``rstd = 1 / sqrt(reserve_space_2 + epsilon)``, sums and means over all
        elements of a channel::

            x_backprop      = scale * rstd * (y_backprop - mean(y_backprop) - xc * rstd**2 * mean(y_backprop * xc))
            scale_backprop  = rstd * sum(y_backprop * xc)
            offset_backprop = sum(y_backprop)

        Without ``is_training``, ``x_backprop = scale * rstd * y_backprop``.

        Args:
            y_backprop: The gradient of the output; float16, bfloat16 or float32, 4-D or 5-D.
            x: The input of the forward pass; dtype and shape of y_backprop.
            scale: Gamma; float32, shape (C,).
            reserve_space_1: The mean; float32, shape (C,).
            reserve_space_2: The variance, see ``reserve_space_2_kind``; float32, shape (C,).
            reserve_space_3: float32 of any shape, or None. Its elements are ignored, as by the op on a CPU, and not
                sent.
            epsilon: Added to the variance; rounded to float32, finite and not negative.
            data_format: "NHWC" or "NCHW" for 4-D, "NDHWC" or "NCDHW" for 5-D tensors.
            is_training: Whether mean and variance were computed from x, rather than being constants.
            name: Ignored; here so that calls of the op need no change.
            reserve_space_2_kind: "variance" for the variance without epsilon, as from TensorFlow on a CPU, or
                "inverse_std" for rstd itself, as saved by cuDNN and PyTorch in training; epsilon is then unused.
            timeout: How long the call may take, in seconds; None for the client's own limit.

        Raises:
            BngradError: See the class.
        """
        return self._run(
            _ops.fused_batch_norm_grad_v3(
                y_backprop, x, scale, reserve_space_1, reserve_space_2, reserve_space_3,
                epsilon, data_format, is_training, reserve_space_2_kind,
            ),
            timeout,
        )  # fmt: skip

    def fused_batch_norm_grad_v2(
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
        """Computes TensorFlow's ``FusedBatchNormGradV2``, with the arguments of ``tf.raw_ops``.

        Like `fused_batch_norm_grad_v3`, but 4-D only and without reserve_space_3.

        Args:
            y_backprop: The gradient of the output; float16, bfloat16 or float32, 4-D.
            x: The input of the forward pass; dtype and shape of y_backprop.
            scale: Gamma; float32, shape (C,).
            reserve_space_1: The mean; float32, shape (C,).
            reserve_space_2: The variance, see ``reserve_space_2_kind``; float32, shape (C,).
            epsilon: Added to the variance; rounded to float32, finite and not negative.
            data_format: "NHWC" or "NCHW".
            is_training: Whether mean and variance were computed from x, rather than being constants.
            name: Ignored; here so that calls of the op need no change.
            reserve_space_2_kind: "variance" or "inverse_std", as in `fused_batch_norm_grad_v3`.
            timeout: How long the call may take, in seconds; None for the client's own limit.

        Raises:
            BngradError: See the class.
        """
        return self._run(
            _ops.fused_batch_norm_grad_v2(
                y_backprop, x, scale, reserve_space_1, reserve_space_2,
                epsilon, data_format, is_training, reserve_space_2_kind,
            ),
            timeout,
        )  # fmt: skip

    def batch_norm_training_backprop(
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
        """Computes oneDNN Graph's ``BatchNormTrainingBackprop``: the training formula of `fused_batch_norm_grad_v3`.

        Args:
            input_forward: The input of the forward pass; float16, bfloat16 or float32, 2-D to 5-D.
            output_delta: The gradient of the output; dtype and shape of input_forward.
            mean: The mean; float32, or bfloat16 beside a bfloat16 input_forward, shape (C,).
            variance: The biased variance, without epsilon; dtype and shape of mean.
            gamma: The scale, dtype and shape of mean; None counts as ones.
            epsilon: Added to the variance; rounded to float32, finite and positive.
            data_format: "NXC" for channels last, "NCX" for channels second.
            timeout: How long the call may take, in seconds; None for the client's own limit.

        Raises:
            BngradError: See the class.
        """
        return self._run(
            _ops.batch_norm_training_backprop(
                input_forward, output_delta, mean, variance, gamma, epsilon, data_format
            ),
            timeout,
        )  # fmt: skip

    def server_info(self, *, timeout: float | None = None) -> ServerInfo:
        """Asks the server what it is, what it computes on and what it accepts.

        Args:
            timeout: How long the call may take, in seconds; None for the client's own limit.

        Raises:
            BngradError: See the class.
        """
        return self._run(_ops.server_info(), timeout)

    def close(self) -> None:
        """Gives the connection up; calls in flight end with a `ClientClosedError`. Closing again does nothing."""
        self._closed = True
        self._channel.close()

    def _run(self, call: _ops.Call[Result], timeout: float | None) -> Result:
        seconds = self._timeout if timeout is None else _channel.check_timeout(timeout)
        if self._closed:
            raise ClientClosedError(f"{self!r} is closed")
        method: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(call.method)
        try:
            response = method(call.request, timeout=_channel.grpc_timeout(seconds))
        except grpc.RpcError as error:
            if self._closed:
                raise ClientClosedError(f"{self!r} was closed during the call") from error
            raise from_rpc_error(error, self._target, seconds) from error
        except ValueError as error:
            # What a channel raises that another thread has closed just now.
            if self._closed:
                raise ClientClosedError(f"{self!r} is closed") from error
            raise
        return call.read(response)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"bngrad.Client({self._target!r})"
