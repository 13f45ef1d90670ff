"""The client for threads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NoReturn, SupportsIndex, TypeVar, overload

import numpy as np
import numpy.typing as npt

from bngrad import _validation
from bngrad._ahead.tensor import AheadTensor
from bngrad._call_runner import CallRunner
from bngrad._credentials import Tls, Token
from bngrad._deadline import Cancellation
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


class Client:
    """Computes gradients of fused batch normalisation on a server.

    One client serves any number of threads. The server need not be up when the client is made: the first call opens
    connections, and calls open them again after they were lost.

    Tensors may be NumPy arrays of any memory layout and byte order, tensors of PyTorch, TensorFlow or JAX in the
    CPU's memory, anything else with ``__dlpack__`` or ``__array__``, or numbers in (nested) Python sequences, which
    become float32. Results are new NumPy arrays, which may be written to; bfloat16 is ``ml_dtypes.bfloat16``. Tensors
    with the channels second whose memory has them last, as PyTorch's ``channels_last`` does, are sent as they lie.

    Every call is a pure function of its request, so the client repeats it, within its timeout, where that may help:
    when the connection was lost or the server is stopping, and when the server is overloaded and says when to retry.
    Between attempts it waits a random time, which grows from 50 ms to 2 s and is never shorter than the server said.
    An error after several attempts says how many there were. An address that has never answered is not tried again.
    Without a timeout, unavailable servers are tried five times.

    Several servers share the calls: each call goes to the server with the fewest calls in flight for its speed, and at
    once to another one if that server is not available or overloaded. A server that is not available gets no more
    calls until it answers again. Names are looked up again every few seconds of calls: new servers get their share, and
    servers that the name no longer stands for finish their calls.

    With the target ``local:`` there is no server: the kernels of a CPU server compute the calls in this process, with
    the same bits and errors. They need the extra ``bngrad[local]``. The first call loads them; the first call of a
    dtype on a machine has them compiled, and NumPy computes meanwhile, more slowly. No timeout ends a call that is
    being computed.

    In the docstrings, C is the number of channels. Every call may raise, besides the errors that it names itself:

    * `bngrad.InvalidArgumentError`: the request breaks the op's contract; ``violations`` names each argument.
    * `bngrad.DeadlineExceededError`: no answer came within the timeout.
    * `bngrad.UnauthenticatedError`: the server requires a token, and does not accept the client's.
    * `bngrad.UnavailableError`: no server answers at the target, or the server is stopping.
    * `bngrad.ResourceExhaustedError`: the request is larger than the server's memory for requests, or the server was
      overloaded until the timeout; ``retry_delay_s`` tells them apart.
    * `bngrad.InternalError`: the server failed.
    * `bngrad.ClientClosedError`: the client was closed.
    * TypeError: an argument that is not a tensor has the wrong type.
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
        """Makes a client, which connects when it is first used.

        Args:
            target: ``HOST:PORT``, ``unix:PATH`` or any other gRPC target; or several of these, whose servers share the
                calls. The servers of a name with several addresses share them too. ``local:`` is the CPU of this
                process, see the class. Or a function that returns these, which is called from a thread: at the first
                call, every few seconds of calls, and after a call has failed. If it raises an error, or returns no
                target, the last ones are kept.
            timeout: The timeout of calls that are given none of their own, in seconds; ``math.inf`` for no limit.
            transport: How tensors travel. "auto" takes the fastest transport that there is; "shared" only memory that
                is shared with a server on this host; "stream" chunks on a stream, of any size; "unary" one gRPC
                message each way, of at most ``ServerInfo.max_message_bytes``. The results have the same bits.
            retries: Whether failed calls are repeated where that may help.
            tls: Whether TCP connections are encrypted: True for servers whose certificates the system trusts, a
                `bngrad.Tls` for others. Unix sockets and shared memory never leave this host, and are not encrypted.
            token: What identifies the client to a server that requires it: the token itself, the path of a file with
                it, or a function that returns it. Files are read, and functions called, for each call.
            insecure: Whether the token may be sent to other hosts without TLS.
            options: gRPC channel arguments, such as ``("grpc.keepalive_time_ms", 30_000)``.
            fallback: "local" to compute calls in this process, by the kernels of the CPU, that no server answers within
                their retries; None for an error. See ``fallback_calls``.

        Raises:
            ModuleNotFoundError: The target is ``local:``, or the fallback "local", and Numba is not installed.
        """
        self._calls = CallRunner(
            "bngrad.Client", target,
            timeout=timeout, transport=transport, retries=retries, tls=tls, token=token, insecure=insecure,
            options=options, fallback=fallback,
        )  # fmt: skip

    def fused_batch_norm_grad_v3(
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
        """Computes TensorFlow's ``FusedBatchNormGradV3``, with the arguments of ``tf.raw_ops``.

        With ``xc = x - reserve_space_1``, ``rstd = 1 / sqrt(reserve_space_2 + epsilon)``, sums and means over all
        elements of a channel:

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
            name: Ignored; accepted so that calls of the op need no change.
            reserve_space_2_kind: "variance" for the variance without epsilon, as from TensorFlow on a CPU, or
                "inverse_std" for rstd itself, as saved by cuDNN and PyTorch in training; epsilon is then unused.
            out: Where to put x_backprop; a NumPy array or a PyTorch tensor of its dtype and shape that overlaps no
                other argument.
            priority: From -8 to 8. Requests of higher priority are computed first; it is a head start, so that no
                other request waits forever.
            timeout: How long the call may take, in seconds; None for the client's own timeout.

        Raises:
            BngradError: See the class.
        """
        tensors = (y_backprop, x, scale, reserve_space_1, reserve_space_2, reserve_space_3)
        attributes = TensorFlowAttributes(epsilon, data_format, is_training, reserve_space_2_kind, priority)
        return self._run(ops.V3, tensors, attributes, out, timeout)

    def fused_batch_norm_grad_v2(
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
            name: Ignored; accepted so that calls of the op need no change.
            reserve_space_2_kind: "variance" or "inverse_std", as in `fused_batch_norm_grad_v3`.
            out: Where to put x_backprop, as in `fused_batch_norm_grad_v3`.
            priority: As in `fused_batch_norm_grad_v3`.
            timeout: How long the call may take, in seconds; None for the client's own timeout.

        Raises:
            BngradError: See the class.
        """
        tensors = (y_backprop, x, scale, reserve_space_1, reserve_space_2)
        attributes = TensorFlowAttributes(epsilon, data_format, is_training, reserve_space_2_kind, priority)
        return self._run(ops.V2, tensors, attributes, out, timeout)

    def batch_norm_training_backprop(
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
        """Computes oneDNN Graph's ``BatchNormTrainingBackprop``: the training formula of `fused_batch_norm_grad_v3`.

        Args:
            input_forward: The input of the forward pass; float16, bfloat16 or float32, 2-D to 5-D.
            output_delta: The gradient of the output; dtype and shape of input_forward.
            mean: The mean; float32, or bfloat16 beside a bfloat16 input_forward, shape (C,).
            variance: The biased variance, without epsilon, see ``variance_kind``; dtype and shape of mean.
            gamma: The scale; dtype and shape of mean; None means ones.
            epsilon: Added to the variance; rounded to float32, finite and positive.
            data_format: "NXC" for channels last, "NCX" for channels second.
            variance_kind: "variance", or "inverse_std" for ``1 / sqrt(variance + epsilon)`` in its place, as saved by
                cuDNN and PyTorch in training; epsilon is then unused.
            out: Where to put input_delta, as x_backprop in `fused_batch_norm_grad_v3`.
            priority: As in `fused_batch_norm_grad_v3`.
            timeout: How long the call may take, in seconds; None for the client's own timeout.

        Raises:
            BngradError: See the class.
        """
        tensors = (input_forward, output_delta, mean, variance, gamma)
        attributes = OneDnnAttributes(epsilon, data_format, variance_kind, priority)
        return self._run(ops.TRAINING_BACKPROP, tensors, attributes, out, timeout)

    def fused_batch_norm_grad_grad(
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
        """Computes the gradient that TensorFlow registers for ``FusedBatchNormGradV3`` and ``FusedBatchNormGradV2``.

        This is the second order: from the gradients of the first three outputs of `fused_batch_norm_grad_v3`, it
        computes those of its inputs y_backprop, x and scale. With ``is_training``, mean and variance are functions of
        x, so they are computed from it rather than taken from the reserves; the reserves have no gradient.

        Args:
            grad_x_backprop: The gradient of x_backprop; dtype and shape of x.
            grad_scale_backprop: The gradient of scale_backprop; float32, shape (C,).
            grad_offset_backprop: The gradient of offset_backprop; float32, shape (C,).
            y_backprop: As in `fused_batch_norm_grad_v3`, and so are the next arguments up to ``is_training``.
            x: The input of the forward pass.
            scale: Gamma.
            reserve_space_1: The mean; used without ``is_training`` alone.
            reserve_space_2: The variance, see ``reserve_space_2_kind``; used without ``is_training`` alone.
            epsilon: Added to the variance.
            data_format: "NHWC" or "NCHW" for 4-D, "NDHWC" or "NCDHW" for 5-D tensors.
            is_training: Whether mean and variance were computed from x, rather than being constants.
            reserve_space_2_kind: "variance" or "inverse_std", as in `fused_batch_norm_grad_v3`.
            out: Where to put grad_y_backprop and grad_x: NumPy arrays or PyTorch tensors of the dtype and shape of x
                that overlap neither each other nor any other argument; None for either that may be a new array.
            priority: As in `fused_batch_norm_grad_v3`.
            timeout: How long the call may take, in seconds; None for the client's own timeout.

        Raises:
            BngradError: See the class.
        """
        tensors = (
            grad_x_backprop, grad_scale_backprop, grad_offset_backprop,
            y_backprop, x, scale, reserve_space_1, reserve_space_2,
        )  # fmt: skip
        attributes = TensorFlowAttributes(epsilon, data_format, is_training, reserve_space_2_kind, priority)
        return self._run(ops.GRAD_GRAD, tensors, attributes, out, timeout)

    def server_info(self, *, timeout: float | None = None) -> ServerInfo:
        """Asks the server for its version, devices, ops and limits; of several servers, any one that is up.

        Args:
            timeout: How long the call may take, in seconds; None for the client's own timeout.

        Raises:
            BngradError: See the class.
        """
        return self._calls.server_info(self._calls.deadline(timeout), Cancellation(only_by_close=True))

    @overload
    def empty(self, shape: SupportsIndex | Sequence[SupportsIndex]) -> npt.NDArray[np.float32]: ...

    @overload
    def empty(
        self, shape: SupportsIndex | Sequence[SupportsIndex], dtype: type[Scalar] | np.dtype[Scalar]
    ) -> npt.NDArray[Scalar]: ...

    @overload
    def empty(self, shape: SupportsIndex | Sequence[SupportsIndex], dtype: npt.DTypeLike) -> Array: ...

    def empty(self, shape: SupportsIndex | Sequence[SupportsIndex], dtype: npt.DTypeLike = np.float32) -> Array:
        """Makes an array in memory shared with the server if there is any, else in the client's own.

        Calls do not copy a y_backprop, x or ``out`` that is such an array. The memory is reused once the array, and
        every view of it, has gone. Of several servers, the first that shares memory is used; calls that go to another
        server copy the array.

        Args:
            shape: The shape of the array.
            dtype: float16, bfloat16 (``ml_dtypes.bfloat16``), float32 or any other without Python objects.

        Raises:
            BngradError: See the class.
        """
        dimensions, kind = _validation.check_shape(shape), _validation.check_dtype(dtype)
        return self._calls.empty(dimensions, kind, self._calls.deadline(None), Cancellation(only_by_close=True))

    def send_ahead(self, x: Tensor) -> AheadTensor:
        """Begins to send a tensor to a server in the background, before the call that needs it.

        Any op takes the handle that is returned in place of the tensor; the call then sends only the rest. A backward
        pass, for example, needs the x that the forward pass had long before. Calls have the same bits with and without
        this. A call sends the rest of a tensor that was not sent in time, and all of one that the server has evicted or
        that was on a server that has ended; it never sends more than without this.

        Tensors go ahead over the SDK's own HTTP/2 if they have at least 256 KiB, or are copied into shared
        memory. A server's GPU copies them ahead, too, if they have 32 MiB. By grpcio, with ``transport="unary"`` and
        the target ``local:``, the handle only stands for the tensor.

        Args:
            x: float16, bfloat16 or float32. It must not change until the last call that takes the handle has returned:
                it is read in the background, and may be sent again.

        Returns:
            The handle. The server keeps the tensor until it is closed or has gone, or the client is closed.

        Raises:
            InvalidArgumentError: x is no such tensor.
            ClientClosedError: The client was closed.
        """
        return self._calls.send_ahead(as_array("x", x))

    @property
    def fallback_calls(self) -> int:
        """How many calls were computed in this process because no server answered, see ``fallback``."""
        return self._calls.fallback_calls

    def close(self) -> None:
        """Closes the connections; calls in flight end with a `ClientClosedError`. Closing again does nothing.

        Arrays that were made by `empty` or returned by calls remain valid. In a handler of a signal that has
        interrupted a call, this returns at once, and a thread closes the connections.
        """
        self._calls.close()

    def _run(
        self, op: OpSchema[Result], tensors: Sequence[Any], attributes: Attributes, out: Any, timeout: float | None
    ) -> Result:
        if out is None and timeout is None:
            result = self._calls.compute_plain(op, tensors, attributes)
            if result is not None:
                return result
        request = op.prepare(tensors, attributes, out)
        return self._calls.run(request, self._calls.deadline(timeout), Cancellation(only_by_close=True))

    def __reduce__(self) -> NoReturn:
        self._calls.__reduce__()  # also for a shallow copy, which would be closed with the client

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return self._calls.name


def check_client(client: object) -> None:
    """Refuses what is no client.

    Raises:
        TypeError: It is something else, such as a target or a client for asyncio.
    """
    if not isinstance(client, Client):
        raise TypeError(f"client must be a bngrad.Client, not {client!r}")
