"""The servers of a client, and which of them gets the next call."""

from __future__ import annotations

import itertools
import random
import threading
import weakref
from collections.abc import Callable, Container, Sequence

import grpc

from bngrad._balancing.resolver import Resolver
from bngrad._balancing.retry import delay_s
from bngrad._cancellation import Cancellation
from bngrad._deadline import Deadline
from bngrad._errors import BngradError, DeadlineExceededError, NotSharedError, UnavailableError, from_status
from bngrad._transports.selector import Connector

_PROBE_TIMEOUT_S = 5.0


class Server:
    """One server, as far as the choice goes.

    Attributes:
        connector: Makes its calls.
        in_flight: How many calls it has.
        is_up: Whether it gets calls; one that is down gets them only where all are.
        strikes: How often it was set aside since it last answered a call.
        is_probed: Whether a thread waits for it to come up.
        retired: Whether it is a server of the client no more.
    """

    def __init__(self, connector: Connector) -> None:
        self.connector = connector
        self.in_flight = 0
        self.is_up = True
        self.strikes = 0
        self.is_probed = False
        self.retired = threading.Event()


class Servers:
    """Spreads calls over servers: the next one goes to whoever has the fewest.

    A server that is not available is set aside, and asked ever less often, by a thread of its own rather than by
    somebody's call, until it answers and has a worker that is ready.
    """

    def __init__(self, targets: Sequence[str], connect: Callable[[str, str | None], Connector]) -> None:
        """Connects to nothing yet.

        Args:
            targets: The addresses, and names that may stand for several.
            connect: Makes a connector to an address, given the host's name that it was found by, if any.
        """
        self._targets = targets
        self._connect = connect
        self._mutex = threading.Lock()
        self._servers: dict[str, Server] = {}
        self._closed = False
        self._was_reached = False
        self._resolver = Resolver(targets)
        if not self._resolver.has_names:
            self._resolver.ask(self._use)
            self._resolver.first.result()

    @property
    def was_reached(self) -> bool:
        """Whether any server was ever there."""
        return self._was_reached or any(server.connector.has_answered for server in list(self._servers.values()))

    def prepare(self, deadline: Deadline, cancellation: Cancellation) -> None:
        """Waits until it is known which servers there are."""
        if self._servers:
            return
        self._resolver.ask(self._use)
        first, known = self._resolver.first, threading.Event()
        first.add_done_callback(lambda _: known.set())
        with cancellation.calls(known.set):
            known.wait(deadline.rest_s())
        if cancellation.cancelled or self._closed:
            raise UnavailableError("the call was cancelled")
        if first.done():
            first.result()
        else:
            reason, code = "its name is still being looked up", grpc.StatusCode.DEADLINE_EXCEEDED
            raise from_status(code, reason, b"", ", ".join(self._targets), deadline.timeout)

    def take(self, waiting: Container[object] = (), *, in_order: bool = False) -> Server | None:
        """The server that gets the next call, until it is given back; None if all are waited for.

        Args:
            waiting: Servers that are not to be taken.
            in_order: Whether to take the first that is up, whatever it has to do.
        """
        with self._mutex:
            servers = self._servers.values()
            able = [each for each in servers if each.is_up] or servers
            able = [each for each in able if each not in waiting]
            if not able:
                return None
            # Among equals a random one, or all clients would begin with the same.
            chosen = able[0] if in_order or len(able) == 1 else min(able, key=_burden)
            chosen.in_flight += 1
            return chosen

    def give_back(self, server: Server) -> None:
        """Ends what `take` began."""
        with self._mutex:
            server.in_flight -= 1
            is_over = server.in_flight == 0 and server.retired.is_set()
        if is_over:
            server.connector.close()

    def answered(self, server: Server) -> None:
        """Takes note that a server has answered."""
        server.is_up = True
        server.strikes = 0
        self._was_reached = True

    def failed(self, server: Server, error: BngradError) -> None:
        """Takes note of what a call ended with."""
        if isinstance(error, NotSharedError):  # which may be known without asking
            return
        if not isinstance(error, UnavailableError | DeadlineExceededError):
            self._was_reached = True
            return
        self._resolver.ask(self._use)
        with self._mutex:
            if not server.is_up or len(self._servers) == 1 or self._closed:
                return
            server.is_up = False
            server.strikes += 1
            needs_probe = not server.is_probed
            server.is_probed = True
        if needs_probe:
            threading.Thread(target=_probe, args=(weakref.ref(self), server), name="bngrad-probe", daemon=True).start()

    def close(self) -> None:
        """Closes every connector."""
        with self._mutex:
            self._closed = True
            servers = list(self._servers.values())
        for server in servers:
            server.retired.set()
            server.connector.close()

    def _use(self, targets: list[str]) -> None:
        """Has calls go to these servers from now on; what the others have in flight may end."""
        with self._mutex:
            if self._closed:
                return
            before = self._servers
            self._servers = {
                target: before[target]
                if target in before
                else Server(self._connect(target, self._resolver.name_behind(target)))
                for target in targets
            }
            gone = [server for target, server in before.items() if target not in self._servers]
            for server in gone:
                server.retired.set()
            idle = [server for server in gone if server.in_flight == 0]
        for server in idle:
            server.connector.close()

    def probe(self, server: Server) -> bool:
        """Asks a server that was set aside, and says whether it is up."""
        with self._mutex:
            if server.is_up:  # A call was quicker.
                server.is_probed = False
                return True
        try:
            deadline = Deadline.after(_PROBE_TIMEOUT_S)
            devices = server.connector.server_info(deadline, Cancellation(only_by_close=True)).devices
        except (UnavailableError, DeadlineExceededError):
            return False
        except Exception:  # It answers; or the client was closed; or there is no token, which a call is to tell.
            devices = ()
        if devices and not any(device.state == "ready" for device in devices):
            return False
        with self._mutex:
            server.is_up = True
            server.is_probed = False
        return True


def _probe(servers: weakref.ref[Servers], server: Server) -> None:
    """Asks a server that was set aside until it is up, or the client has gone, be it that nobody closed it."""
    for failures in itertools.count(server.strikes):
        if server.retired.wait(delay_s(failures)):
            return
        theirs = servers()
        if theirs is None:
            server.connector.close()
            return
        if theirs.probe(server):
            return
        del theirs


def _burden(server: Server) -> tuple[int, float]:
    return server.in_flight, random.random()  # noqa: S311 - nobody gains by guessing it
