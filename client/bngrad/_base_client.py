"""A client's calls: to one of its servers, and again where that may help."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from bngrad import _validation
from bngrad._balancing.load_balancer import Servers
from bngrad._balancing.retry import Attempts, Budget
from bngrad._cancellation import Cancellation
from bngrad._credentials import Access, Security
from bngrad._deadline import Deadline
from bngrad._errors import BngradError, ClientClosedError, NotSharedError, UnavailableError
from bngrad._requests.request import Call
from bngrad._results import Array, ServerInfo
from bngrad._shared_memory.lease import LeaseError
from bngrad._shared_memory.pool import Pool
from bngrad._shared_memory.quarantine import Doubts
from bngrad._transports.selector import Connector
from bngrad._validation import Transport

Result = TypeVar("Result")


class Caller:
    """Makes the calls of a client, from any number of threads."""

    def __init__(
        self,
        targets: Sequence[str],
        transport: Transport,
        retries: bool,
        options: Iterable[_validation.ChannelOption],
        security: Security,
    ) -> None:
        """Connects to nothing yet.

        Args:
            targets: The servers' addresses.
            transport: Which way calls go.
            retries: Whether calls that failed are repeated.
            options: gRPC channel arguments.
            security: TLS, and who calls.
        """
        self._transport = transport
        self._retries = retries
        options = _validation.check_options(options)
        self._doubts = doubts = Doubts()  # not self in what it has others call, or only the collector would free them
        self._servers = Servers(
            targets,
            lambda target, name: Connector(target, transport, options, doubts, Access(security, target, name)),
        )
        self._budget = Budget()
        self._own_memory = Pool(None)
        self._mutex = threading.Lock()
        self._running: set[Cancellation] = set()
        self._closed = False
        self._process = os.getpid()

    def run(self, call: Call[Result], deadline: Deadline, cancellation: Cancellation) -> Result:
        """Makes a call.

        Args:
            call: The call.
            deadline: When to give up.
            cancellation: Where to hear that the caller has lost interest.

        Raises:
            BngradError: See `bngrad.Client`.
        """
        return self._made(lambda server: server.run(call, deadline, cancellation), deadline, cancellation)

    def server_info(self, deadline: Deadline, cancellation: Cancellation) -> ServerInfo:
        """Asks a server what it is."""
        return self._made(lambda server: server.server_info(deadline, cancellation), deadline, cancellation)

    def empty(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], deadline: Deadline, cancellation: Cancellation
    ) -> Array:
        """A new array, in memory shared with the first server that shares any."""
        try:
            return self._made(
                lambda server: server.empty(shape, dtype, deadline, cancellation), deadline, cancellation, in_order=True
            )
        except NotSharedError:
            if self._transport == "shared":
                raise
            return self._own_memory.empty(shape, dtype)

    def close(self) -> None:
        """Ends every call; closing again does nothing, nor does a forked child, whose parent goes on calling."""
        if self._process != os.getpid():
            return
        with self._mutex:
            self._closed = True
            running = list(self._running)
        self._servers.close()
        for cancellation in running:
            cancellation.cancel()
        self._doubts.close()
        self._own_memory.close()

    def check_open(self) -> None:
        """Raises `ClientClosedError` where no more calls can be made, or not by this process.

        A forked child has its parent's connections and shared memory, and would get and spoil its parent's answers.
        """
        if self._process != os.getpid():
            raise ClientClosedError(f"is of process {self._process}, which was forked: make one in the child")
        if self._closed:
            raise ClientClosedError("is closed")

    def _made(
        self,
        what: Callable[[Connector], Result],
        deadline: Deadline,
        cancellation: Cancellation,
        *,
        in_order: bool = False,
    ) -> Result:
        """Lets `close` end what is done, and says so."""
        self.check_open()  # before the mutex, which a forked child may have got locked
        with self._mutex:
            self.check_open()
            self._running.add(cancellation)
        try:
            return self._repeated(what, deadline, cancellation, in_order)
        except (BngradError, LeaseError, ValueError) as error:
            # A ValueError is what a channel raises that another thread has closed just now.
            if self._closed:
                raise ClientClosedError("was closed during the call") from error
            raise
        finally:
            self._running.discard(cancellation)

    def _repeated(
        self,
        what: Callable[[Connector], Result],
        deadline: Deadline,
        cancellation: Cancellation,
        in_order: bool,
    ) -> Result:
        began = time.monotonic()
        self._servers.prepare(deadline, cancellation)
        attempts: Attempts | None = None
        while True:
            server = self._servers.take(attempts.waiting() if attempts else (), in_order=in_order)
            if server is None:
                assert attempts is not None
                attempts.wait(not self._servers.was_reached or not self._budget.allows, cancellation)
                continue
            try:
                result = what(server.connector)
            except BngradError as error:
                if cancellation.cancelled:
                    raise
                self._servers.failed(server, error)
                if isinstance(error, UnavailableError) and not isinstance(error, NotSharedError):
                    self._budget.failed(len(self._running))
                if not self._retries and not isinstance(error, NotSharedError):
                    raise
                attempts = attempts or Attempts(deadline, began)
                attempts.failed(server, error)
            else:
                self._servers.answered(server)
                self._budget.succeeded()
                return result
            finally:
                self._servers.give_back(server)
