"""Runs the calls of a client: picks a server for each, repeats failed calls, and ends all when the client closes."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

import numpy as np

from bngrad import _validation
from bngrad._ahead.sender import AheadSender
from bngrad._ahead.tensor import AheadTensor, check_handle, server_of
from bngrad._balancing.load_balancer import LoadBalancer
from bngrad._balancing.retry import Attempts, RetryBudget
from bngrad._balancing.upstream import Selector
from bngrad._credentials import Credentials, Tls, Token, check_security
from bngrad._deadline import Cancellation, Deadline
from bngrad._errors import BngradError, ClientClosedError, NotSharedError, UnavailableError
from bngrad._requests.request import Attributes, OpSchema, PreparedRequest, in_wire_layout
from bngrad._results import ServerInfo
from bngrad._shared_memory.lease import LeaseError
from bngrad._shared_memory.pool import Pool
from bngrad._shared_memory.quarantine import Quarantine
from bngrad._transports.selector import TransportSelector
from bngrad.typing import Array, Targets, Transport

if TYPE_CHECKING:
    from bngrad._local.fallback import Fallback
    from bngrad._local.kernels import LocalKernels

Result = TypeVar("Result")

_PATIENCE_S = 10.0
"""For how long a call is repeated that else is computed here: longer than most servers take to start."""
_ERRORS_OF_CLOSE = (BngradError, LeaseError, ValueError)
"""What a call that `CallRunner.close` ends may raise: grpcio raises ValueError on a channel that was just closed."""


class CallRunner:
    """Runs the calls of one client, from any number of threads.

    Attributes:
        name: The client as errors name it, such as ``bngrad.Client('localhost:50051')``.
        local: What computes every call in this process; None if servers do.
    """

    def __init__(
        self,
        kind: str,
        target: Targets,
        *,
        timeout: float,
        transport: Transport,
        retries: bool,
        tls: Tls | bool,
        token: Token | None,
        insecure: bool,
        options: Iterable[_validation.ChannelOption],
        fallback: Literal["local"] | None,
    ) -> None:
        """Checks the arguments, which are those of a client of the class ``kind``; connects to nothing yet."""
        targets = target if callable(target) else _validation.check_targets(target)
        self.name = f"{kind}({target!r})"
        self._timeout = _validation.check_timeout(timeout)
        self._transport = _validation.check_transport(transport)
        self._retries = _validation.check_retries(retries)
        security = check_security([] if callable(targets) else targets, tls, token, insecure)
        channel_options = _validation.check_options(options)
        self._fallback = _fallback(self.name) if _validation.check_fallback(fallback) else None
        has_fallback = self._fallback is not None
        self._quarantine = quarantine = Quarantine()

        has_local = not callable(targets) and _validation.LOCAL in targets
        kernels = _local_kernels() if has_local else None  # says at once if Numba is missing
        self.local = local = kernels if targets == [_validation.LOCAL] else None
        if transport != "unary" or has_fallback or has_local:
            _validation.check_threads()

        # These must not refer to self: that cycle would leave the client to the garbage collector.
        def check(named: Sequence[str]) -> list[str]:
            checked = _validation.check_targets(named)
            check_security(checked, tls, token, insecure)
            return checked

        def connect(address: str, hostname: str | None, has_others: Callable[[], bool]) -> Selector:
            if address == _validation.LOCAL:
                return local or _local_kernels()
            credentials = Credentials(security, address, hostname)

            def may_leave() -> bool:
                return has_fallback or (retries and has_others())

            return TransportSelector(address, transport, channel_options, quarantine, credentials, may_leave)

        self._load_balancer = LoadBalancer(targets, check, connect)
        self._retry_budget = RetryBudget()
        self._patience_s = math.inf if self._fallback is None else _PATIENCE_S
        self._own_memory = Pool(None)
        self._ahead = AheadSender(self._load_balancer, self._timeout)
        self._identity = object()
        self._running: set[Cancellation] = set()
        self._closed = False
        self._process = os.getpid()

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self.name} cannot be pickled or copied: make a client in each process")

    @property
    def fallback_calls(self) -> int:
        """How many calls were computed in this process since no server answered."""
        return 0 if self._fallback is None else self._fallback.calls

    @property
    def is_remote(self) -> bool:
        """Whether a server that is known sends and receives tensors over a network."""
        return self._load_balancer.is_remote

    def deadline(self, timeout: float | None) -> Deadline:
        """Returns the deadline of a call that starts now; with the client's own timeout where None is given."""
        return Deadline.after(self._timeout if timeout is None else _validation.check_timeout(timeout))

    def run(self, request: PreparedRequest[Result], deadline: Deadline, cancellation: Cancellation) -> Result:
        """Makes a call; raises the errors of `bngrad.Client`."""
        for field, tensor in request.ahead.items():
            check_handle(field, tensor, self._identity, self.name)

        def attempt(server: Selector) -> Result:
            return server.run(request, deadline, cancellation)

        def ask(*, retries: bool = self._retries) -> Result:
            preferred = list(map(server_of, request.ahead.values()))
            return self._ask(
                attempt, deadline, cancellation, preferred=preferred, retries=retries, patience_s=self._patience_s
            )

        if self._fallback is None:
            return self._run(ask, cancellation)
        fallback = self._fallback
        return self._run(lambda: self._run_or_compute(fallback, ask, request, deadline, cancellation), cancellation)

    def compute_plain(self, op: OpSchema[Result], tensors: Sequence[Any], attributes: Attributes) -> Result | None:
        """Computes a call as `bngrad._local.kernels.LocalKernels.compute_plain`; None if servers compute the calls."""
        if self.local is None:
            return None
        self.check_open()
        try:
            return self.local.compute_plain(op, tensors, attributes)
        except _ERRORS_OF_CLOSE as error:
            self._check_not_closed_during_call(error)
            raise

    def server_info(self, deadline: Deadline, cancellation: Cancellation) -> ServerInfo:
        """Asks any one server for its `ServerInfo`."""

        def attempt(server: Selector) -> ServerInfo:
            return server.server_info(deadline, cancellation)

        return self._run(lambda: self._ask(attempt, deadline, cancellation), cancellation)

    def empty(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], deadline: Deadline, cancellation: Cancellation
    ) -> Array:
        """Makes an array in memory of the first server that shares any, else in the client's own."""

        def attempt(server: Selector) -> Array:
            return server.empty(shape, dtype, deadline, cancellation)

        def ask_or_make() -> Array:
            if self._fallback is not None and self._fallback.in_outage:  # calls find out when a server answers again
                return self._own_memory.empty(shape, dtype)
            try:
                return self._ask(attempt, deadline, cancellation, in_order=True, patience_s=self._patience_s)
            except UnavailableError as error:
                may_be_own = (
                    self._transport != "shared" if isinstance(error, NotSharedError) else self._fallback is not None
                )
                if not may_be_own:
                    raise
                return self._own_memory.empty(shape, dtype)

        return self._run(ask_or_make, cancellation)

    def send_ahead(self, array: Array) -> AheadTensor:
        """Begins to send a tensor, which was converted, ahead of the calls that need it; see `bngrad.Client`."""
        self.check_open()
        tensor, wire = in_wire_layout(array.view())  # so that it keeps the shape that it has now
        upload = None if self.local is not None or self._transport == "unary" else self._ahead.send(wire)
        return AheadTensor(self._identity, tensor, wire, upload)

    def close(self) -> None:
        """Ends every call. Does nothing when called again, or in a forked child, whose parent keeps the client."""
        if self._process != os.getpid():
            return
        self._closed = True
        here = threading.get_ident()
        if any(each.thread == here for each in tuple(self._running)):
            # A handler of a signal, or the garbage collector, has interrupted this thread, which may hold locks.
            with suppress(RuntimeError):  # the system has no thread, or Python ends: calls see that it is closed
                threading.Thread(target=self._close, name="bngrad-close", daemon=True).start()
            return
        self._close()

    def _close(self) -> None:
        closing = Cancellation()
        closing.thread = threading.get_ident()
        running = list(self._running)
        self._running.add(closing)  # a handler that closes the client may interrupt this, too
        try:
            self._close_all(running)
        finally:
            self._running.discard(closing)

    def _close_all(self, running: Sequence[Cancellation]) -> None:
        self._ahead.close()
        self._load_balancer.close()
        for cancellation in running:
            cancellation.cancel()
        self._quarantine.close()
        self._own_memory.close()
        if self._fallback is not None:
            self._fallback.kernels.close()

    def check_open(self) -> None:
        """Checks that this process may make calls.

        A forked child has its parent's connections and shared memory: it would read and spoil its parent's answers.

        Raises:
            ClientClosedError: The client was closed, or was inherited by a fork.
        """
        if self._process != os.getpid():
            problem = f"is of process {self._process}, which was forked: make one in the child"
            raise ClientClosedError(f"{self.name} {problem}")
        if self._closed:
            raise ClientClosedError(f"{self.name} is closed")

    def _run(self, call: Callable[[], Result], cancellation: Cancellation) -> Result:
        """Runs a call that `close` ends with a `ClientClosedError`."""
        cancellation.thread = threading.get_ident()
        try:
            self._running.add(cancellation)  # before the client is found open, or `close` might not see it
            self.check_open()
            if cancellation.cancelled:
                raise UnavailableError("the call was cancelled")
            return call()
        except _ERRORS_OF_CLOSE as error:
            self._check_not_closed_during_call(error)
            raise
        finally:
            self._running.discard(cancellation)

    def _check_not_closed_during_call(self, error: Exception) -> None:
        if self._closed and not isinstance(error, ClientClosedError):
            raise ClientClosedError(f"{self.name} was closed during the call") from error

    def _run_or_compute(
        self,
        fallback: Fallback,
        ask: Callable[..., Result],
        request: PreparedRequest[Result],
        deadline: Deadline,
        cancellation: Cancellation,
    ) -> Result:
        """Asks the servers, and computes the call here if none answers."""
        if self._quarantine.release(request.arrays) is not None or not fallback.is_pausing():
            try:
                result = ask(retries=self._retries and not fallback.in_outage)
            except BngradError as error:
                is_written = self._quarantine.release(request.arrays) is not None
                if not fallback.covers(error) or cancellation.cancelled or is_written:
                    raise
                fallback.failed(error)
            else:
                fallback.answered()
                return result
        fallback.count()
        return fallback.kernels.run(request, deadline, cancellation)

    def _ask(
        self,
        attempt: Callable[[Selector], Result],
        deadline: Deadline,
        cancellation: Cancellation,
        *,
        in_order: bool = False,
        preferred: Container[object] = (),
        retries: bool | None = None,
        patience_s: float = math.inf,
    ) -> Result:
        """Makes attempts at the servers until one answers."""
        if self.local is not None:
            return attempt(self.local)
        started_at = time.monotonic()
        attempts: Attempts | None = None
        while True:
            self._load_balancer.prepare(deadline, cancellation, started_at if attempts is None else time.monotonic())
            is_hopeless = not self._load_balancer.was_reached or not self._retry_budget.allows
            excluded = attempts.excluded(is_hopeless) if attempts else ()
            use = self._load_balancer.acquire(excluded, in_order=in_order, preferred=preferred)
            if use is None:
                assert attempts is not None
                attempts.wait(is_hopeless, cancellation)
                continue
            server = use.server
            try:
                result = attempt(server.selector)
            except BngradError as error:
                if cancellation.cancelled:
                    raise
                self._load_balancer.failed(server, error)
                if isinstance(error, UnavailableError) and not isinstance(error, NotSharedError):
                    self._retry_budget.failed(len(self._running))
                if not (self._retries if retries is None else retries) and not isinstance(error, NotSharedError):
                    raise
                attempts = attempts or Attempts(deadline, started_at, patience_s)
                attempts.failed(server, error)
            else:
                self._load_balancer.answered(server)
                self._retry_budget.succeeded()
                return result
            finally:
                self._load_balancer.release(use)


def _local_kernels() -> LocalKernels:
    from bngrad._local.kernels import LocalKernels  # noqa: PLC0415 - few clients need the kernels' package

    return LocalKernels()


def _fallback(name: str) -> Fallback:
    from bngrad._local.fallback import Fallback  # noqa: PLC0415 - as above

    return Fallback(name)
