"""The client for threads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import SupportsIndex, TypeVar

import numpy as np
import numpy.typing as npt

from bngrad import _validation
from bngrad._balancing.resolver import check_targets
from bngrad._base_client import Caller
from bngrad._cancellation import Cancellation
from bngrad._credentials import Tls, Token, check_security
from bngrad._deadline import Deadline
from bngrad._errors import ClientClosedError
from bngrad._gradients import Gradients
from bngrad._requests.request import Call
from bngrad._results import Array, ServerInfo
from bngrad._validation import Transport

Result = TypeVar("Result")


class Client(Gradients):
    """Has gradients of fused batch normalisation computed by a server.

    One client serves any number of threads. The server need not be up when the client is made: connections are opened
    by the first call, and again after they were lost.

    Tensors may be NumPy arrays of any memory layout and byte order, tensors of PyTorch, TensorFlow or JAX in the
    CPU's memory, anything else with ``__dlpack__`` or ``__array__``, or numbers in (nested) Python sequences, which
    become float32. Results are new NumPy arrays, which may be written to; bfloat16 is ``ml_dtypes.bfloat16``.

    Every call is a pure function of its request, so the client makes it again, within its timeout, where that may help:
    when the connection was lost or the server is stopping, and when the server is overloaded and says when to come
    back. Between attempts it waits a random time, which grows from 50 ms to 2 s and never falls short of what the
    server said. An error after several attempts tells how many there were. An address that has never answered is not
    tried again. Without a timeout, servers that stay away are tried five times.

    Several servers share the calls: each call goes to the server that has the fewest of this client in flight, and on
    to another one at once where that one is not available or overloaded. A server that is not available gets no more
    calls until it answers again.

    In the docstrings, C is the number of channels. Every call may raise, beside what it names itself:

    * `bngrad.InvalidArgumentError`: the request breaks the op's contract; ``violations`` names each argument.
    * `bngrad.DeadlineExceededError`: no answer came within the timeout.
    * `bngrad.UnauthenticatedError`: the server asks for a token, and this one is not good.
    * `bngrad.UnavailableError`: nobody answers at the target, or the server is stopping.
    * `bngrad.ResourceExhaustedError`: the request is larger than the server's memory for requests, or the server was
      overloaded until the timeout; ``retry_delay_s`` tells them apart.
    * `bngrad.InternalError`: the server failed.
    * `bngrad.ClientClosedError`: the client was closed.
    * TypeError: an argument that is no tensor has the wrong type.
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
        """Connects to nothing yet.

        Args:
            target: ``HOST:PORT``, ``unix:PATH`` or any other gRPC target; or several of these, whose servers share the
                calls. So do those of a name with several addresses.
            timeout: How long calls may take that are given no timeout of their own, in seconds; ``math.inf`` for
                no limit.
            transport: How tensors travel. "auto" takes the fastest way that there is; "shared" only memory that is
                shared with a server on this host; "stream" chunks on a stream, of any size; "unary" one gRPC message
                each way, of at most ``ServerInfo.max_message_bytes``. The results have the same bits.
            retries: Whether calls that failed are repeated where that may help.
            tls: Whether TCP connections are encrypted: True for servers whose certificates the system trusts, a
                `bngrad.Tls` for others. Unix sockets and shared memory never leave this host, and are not.
            token: What the server knows the caller by, if it asks for that: the token itself, the path of a file that
                has it, or a function that gives it; files and functions are asked at each call.
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

    def server_info(self, *, timeout: float | None = None) -> ServerInfo:
        """Asks the server what it is, what it computes on and what it accepts; of several, any one that is up.

        Args:
            timeout: How long the call may take, in seconds; None for the client's own limit.

        Raises:
            BngradError: See the class.
        """
        deadline = self._deadline(timeout)
        try:
            return self._caller.server_info(deadline, Cancellation(only_by_close=True))
        except ClientClosedError as error:
            raise ClientClosedError(f"{self!r} {error}") from error

    def empty(self, shape: SupportsIndex | Sequence[SupportsIndex], dtype: npt.DTypeLike = np.float32) -> Array:
        """Makes an array in memory that is shared with the server, where there is such, else in the client's own.

        Calls whose y_backprop and x are such arrays copy nothing, and neither does one whose ``out`` is. The memory is
        used again once the array, and every view of it, has gone. Of several servers, the first that shares memory
        does; calls that go to another one copy the array.

        Args:
            shape: Of the array.
            dtype: float16, bfloat16 (``ml_dtypes.bfloat16``), float32 or any other without Python objects.

        Raises:
            BngradError: See the class.
        """
        dimensions, kind = _validation.check_shape(shape), _validation.check_dtype(dtype)
        try:
            return self._caller.empty(dimensions, kind, self._deadline(None), Cancellation(only_by_close=True))
        except ClientClosedError as error:
            raise ClientClosedError(f"{self!r} {error}") from error

    def close(self) -> None:
        """Gives the connections up; calls in flight end with a `ClientClosedError`. Closing again does nothing.

        Arrays that were made by `empty` or came back from calls stay as they are.
        """
        self._caller.close()

    def _run(self, call: Call[Result], timeout: float | None) -> Result:
        deadline = self._deadline(timeout)
        try:
            return self._caller.run(call, deadline, Cancellation(only_by_close=True))
        except ClientClosedError as error:
            raise ClientClosedError(f"{self!r} {error}") from error

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline.after(self._timeout if timeout is None else _validation.check_timeout(timeout))

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"bngrad.Client({self._target!r})"
