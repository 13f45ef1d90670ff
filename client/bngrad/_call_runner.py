"""Runs the calls of a client: picks a server for each, repeats failed calls, and ends all when the client closes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from bngrad import _validation
from bngrad._balancing.load_balancer import LoadBalancer
from bngrad._balancing.retry import Attempts, RetryBudget
from bngrad._credentials import Credentials, Tls, Token, check_security
from bngrad._deadline import Cancellation, Deadline
from bngrad._errors import BngradError, ClientClosedError, NotSharedError, UnavailableError
from bngrad._requests.request import PreparedRequest
from bngrad._results import ServerInfo
from bngrad._shared_memory.lease import LeaseError
from bngrad._shared_memory.pool import Pool
from bngrad._shared_memory.quarantine import Quarantine
from bngrad._transports.selector import TransportSelector
from bngrad.typing import Array, Transport

Result = TypeVar("Result")


class CallRunner:
    """Runs the calls of one client, from any number of threads.

    Attributes:
        name: The client as errors name it, such as ``bngrad.Client('localhost:50051')``.
    """

    def __init__(
        self,
        kind: str,
        target: str | Sequence[str],
        timeout: float,
        transport: Transport,
        retries: bool,
        tls: Tls | bool,
        token: Token | None,
        insecure: bool,
        options: Iterable[_validation.ChannelOption],
    ) -> None:
        """Checks the arguments, which are those of `bngrad.Client` after the class's name; connects to nothing yet."""
        targets = _validation.check_targets(target)
        self.name = f"{kind}({(target if isinstance(target, str) else targets)!r})"
        self._timeout = _validation.check_timeout(timeout)
        self._transport = _validation.check_transport(transport)
        self._retries = _validation.check_retries(retries)
        security = check_security(targets, tls, token, insecure)
        channel_options = _validation.check_options(options)
        # The lambda must not refer to self: that cycle would leave the client to the garbage collector.
        self._quarantine = quarantine = Quarantine()
        self._load_balancer = LoadBalancer(
            targets,
            lambda address, hostname: TransportSelector(
                address, transport, channel_options, quarantine, Credentials(security, address, hostname)
            ),
        )
        self._retry_budget = RetryBudget()
        self._own_memory = Pool(None)
        self._mutex = threading.Lock()
        self._running: set[Cancellation] = set()
        self._closed = False
        self._process = os.getpid()

    def deadline(self, timeout: float | None) -> Deadline:
        """Returns the deadline of a call that starts now; with the client's own timeout where None is given."""
        return Deadline.after(self._timeout if timeout is None else _validation.check_timeout(timeout))

    def run(self, request: PreparedRequest[Result], deadline: Deadline, cancellation: Cancellation) -> Result:
        """Makes a call; raises the errors of `bngrad.Client`."""
        return self._run(lambda server: server.run(request, deadline, cancellation), deadline, cancellation)

    def server_info(self, deadline: Deadline, cancellation: Cancellation) -> ServerInfo:
        """Asks any one server for its `ServerInfo`."""
        return self._run(lambda server: server.server_info(deadline, cancellation), deadline, cancellation)

    def empty(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], deadline: Deadline, cancellation: Cancellation
    ) -> Array:
        """Makes an array in memory of the first server that shares any, else in the client's own."""
        try:
            return self._run(
                lambda server: server.empty(shape, dtype, deadline, cancellation), deadline, cancellation, in_order=True
            )
        except NotSharedError:
            if self._transport == "shared":
                raise
            return self._own_memory.empty(shape, dtype)

    def close(self) -> None:
        """Ends every call. Does nothing when called again, or in a forked child, whose parent keeps the client."""
        if self._process != os.getpid():
            return
        with self._mutex:
            self._closed = True
            running = list(self._running)
        self._load_balancer.close()
        for cancellation in running:
            cancellation.cancel()
        self._quarantine.close()
        self._own_memory.close()

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

    def _run(
        self,
        attempt: Callable[[TransportSelector], Result],
        deadline: Deadline,
        cancellation: Cancellation,
        *,
        in_order: bool = False,
    ) -> Result:
        """Runs a call that `close` ends with a `ClientClosedError`."""
        self.check_open()  # before the mutex, which may have been locked at the moment of a fork
        with self._mutex:
            self.check_open()
            self._running.add(cancellation)
        try:
            return self._run_with_retries(attempt, deadline, cancellation, in_order)
        except (BngradError, LeaseError, ValueError) as error:
            # grpcio raises ValueError on a channel that another thread has just closed.
            if self._closed:
                raise ClientClosedError(f"{self.name} was closed during the call") from error
            raise
        finally:
            self._running.discard(cancellation)

    def _run_with_retries(
        self,
        attempt: Callable[[TransportSelector], Result],
        deadline: Deadline,
        cancellation: Cancellation,
        in_order: bool,
    ) -> Result:
        started_at = time.monotonic()
        self._load_balancer.prepare(deadline, cancellation)
        attempts: Attempts | None = None
        while True:
            server = self._load_balancer.acquire(attempts.waiting() if attempts else (), in_order=in_order)
            if server is None:
                assert attempts is not None
                is_hopeless = not self._load_balancer.was_reached or not self._retry_budget.allows
                attempts.wait(is_hopeless, cancellation)
                continue
            try:
                result = attempt(server.selector)
            except BngradError as error:
                if cancellation.cancelled:
                    raise
                self._load_balancer.failed(server, error)
                if isinstance(error, UnavailableError) and not isinstance(error, NotSharedError):
                    self._retry_budget.failed(len(self._running))
                if not self._retries and not isinstance(error, NotSharedError):
                    raise
                attempts = attempts or Attempts(deadline, started_at)
                attempts.failed(server, error)
            else:
                self._load_balancer.answered(server)
                self._retry_budget.succeeded()
                return result
            finally:
                self._load_balancer.release(server)
