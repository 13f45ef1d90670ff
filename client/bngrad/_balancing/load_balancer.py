"""Chooses the server of each call, among those of a client."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Container, Sequence

from bngrad._balancing.resolver import Address, Resolver
from bngrad._balancing.retry import delay_s
from bngrad._balancing.subset import Subset
from bngrad._balancing.upstream import Selector, Upstream, Use, choose
from bngrad._deadline import Cancellation, Deadline
from bngrad._errors import BngradError, DeadlineExceededError, NotSharedError, UnavailableError
from bngrad_wire.load_report import LoadReport

_PROBE_TIMEOUT_S = 5.0
_HAD_CONNECTION = "Stream removed", "Handshake read failed"
"""What grpcio says of a connection that ended early: often the first one in a forked child, or amid its handshake."""
NEWEST_PART = 0.1
"""What the newest report counts for in an average over all reports."""


class LoadBalancer:
    """Spreads calls over servers: the next call goes to where it would end first, see `choose`.

    A server that is not available is marked down. A thread then probes it, with growing pauses, until it answers and
    has a worker that is ready; no call has to try it. So is a server that was found later than the first ones. One that
    has calls but ends none for a while is asked as well, and marked down if it has no worker that is ready.

    Of a large fleet only a part is used, see `Subset`; a client that has more calls in flight than that uses more.
    """

    def __init__(
        self,
        targets: Sequence[str] | Callable[[], Sequence[str]],
        check: Callable[[Sequence[str]], list[str]],
        connect: Callable[[str, str | None, Callable[[], bool]], Selector],
    ) -> None:
        """Connects to nothing yet.

        Args:
            targets: Addresses, and names that may stand for several addresses; or a function that returns them.
            check: Returns the targets that a function returned, each once, or raises an error.
            connect: Makes the selector for an address and the host name that it was resolved from, if any. It is also
                given what returns whether there are other servers.
        """
        self._connect = connect
        self._mutex = threading.Lock()
        self._subset = Subset()
        self._servers: dict[Address, Upstream] = {}
        self._usable: list[Upstream] = []
        """The servers that are up; all of them if none is."""
        self._leaving: set[Upstream] = set()
        """Those that are no longer servers of the client, but have calls in flight."""
        self._in_flight = 0
        """At least as many calls as are in flight: Ctrl-C may keep some from being subtracted; see `_count_again`."""
        self._calls = 0
        self._usual_capacity: float | None = None
        self._others = 0.0
        """What part of the requests in the servers are those of other clients."""
        self._closed = False
        self._was_reached = False
        use = weakref.WeakMethod(self._use)
        self._resolver = Resolver(targets, check, lambda addresses: (method := use()) and method(addresses))
        if self._resolver.is_static:
            self._resolver.resolve().result()

    @property
    def was_reached(self) -> bool:
        """Whether any server has ever answered."""
        return self._was_reached or any(server.selector.has_answered for server in list(self._servers.values()))

    @property
    def is_remote(self) -> bool:
        """Whether the tensors of calls travel over a network to any server."""
        return any(server.selector.is_remote for server in list(self._servers.values()))

    def prepare(self, deadline: Deadline, cancellation: Cancellation, now: float) -> None:
        """Begins the next look-up if it is due; waits for the first one."""
        if self._servers:
            if now >= self._resolver.due_at:
                self._resolver.resolve()
            return
        lookup, resolved = self._resolver.resolve(), threading.Event()
        lookup.add_done_callback(lambda _: resolved.set())
        with cancellation.calls(resolved.set):
            resolved.wait(deadline.remaining_s())
        if cancellation.cancelled or self._closed:
            raise UnavailableError("the call was cancelled")
        if not lookup.done():
            problem = f"the look-up of the servers did not end within the timeout of {deadline.timeout} s"
            raise DeadlineExceededError(problem)
        lookup.result()

    def acquire(
        self, excluded: Container[object] = (), *, in_order: bool = False, preferred: Container[object] = ()
    ) -> Use | None:
        """Chooses the server for the next call, until `release`; returns None if all that could be used are excluded.

        Args:
            excluded: Servers that must not be used yet.
            in_order: Whether to use the first server that is up, however many calls it has.
            preferred: What makes the calls to servers that have a tensor of the call already.
        """
        with self._mutex:
            usable = self._usable
            if excluded:
                usable = [each for each in usable if each not in excluded]
            if not usable:
                return None
            if preferred:
                usable = [each for each in usable if each.selector in preferred] or usable
            if in_order or len(usable) == 1:
                chosen = usable[0]
            else:
                chosen = choose(usable, self._usual_capacity or 1.0, self._others, self._calls)
            use = Use(chosen)
            self._in_flight += 1
            chosen.count(begun=use)
            self._calls += 1
            size = self._subset.size
            needs_more = self._in_flight > size and not self._subset.is_all and self._count_again() > size
            if needs_more:
                self._subset.size *= 2
            if chosen.is_silent and len(self._servers) > 1:
                self._begin_to_probe(chosen)
        if needs_more:
            self._choose_members()
        return use

    def release(self, use: Use) -> None:
        """Ends the use that `acquire` began."""
        server = use.server
        with self._mutex:
            server.count(ended=use)
            self._in_flight -= 1
            is_over = server.retired.is_set() and not server.in_flight
            if is_over:
                self._leaving.discard(server)
        if is_over:
            server.selector.close()

    def answered(self, server: Upstream) -> None:
        """Records that a server has answered a call."""
        if not server.is_up:
            with self._mutex:
                self._mark(server, is_up=True)
            self._choose_members()
        server.strikes = 0
        self._was_reached = True
        load = server.selector.load
        if load is not server.load and load is not None:
            with self._mutex:
                self._note(server, load)

    def failed(self, server: Upstream, error: BngradError) -> None:
        """Records that a call failed; marks the server down if it is not available."""
        if isinstance(error, NotSharedError):  # the client may know this without asking the server
            return
        if any(sign in str(error) for sign in _HAD_CONNECTION):  # so the address is right
            self._was_reached = True
        if not isinstance(error, UnavailableError | DeadlineExceededError):
            self._was_reached = True
            return
        self._resolver.failed()
        with self._mutex:
            if not server.is_up or len(self._servers) == 1 or self._closed:
                return
            server.strikes += 1
            # First, or Ctrl-C might leave it down with no thread that finds it up again.
            if self._begin_to_probe(server):
                self._mark(server, is_up=False, has_failed=isinstance(error, UnavailableError))
        self._choose_members()

    def close(self) -> None:
        """Closes the connections to every server."""
        with self._mutex:
            self._closed = True
            servers = [*self._servers.values(), *self._leaving]
        for server in servers:
            server.retired.set()
            server.selector.close()

    def probe(self, server: Upstream) -> bool:
        """Asks a server that is marked down, or silent, for its state; marks it, and returns whether it is up."""
        with self._mutex:
            if server.is_up and not server.is_silent:  # a call was answered meanwhile
                server.is_probed = False
                return True
        is_ready = _is_ready(server.selector)
        with self._mutex:
            if is_ready:
                server.hear()
                server.is_probed = False
            self._mark(server, is_up=is_ready, has_failed=not is_ready)
        self._choose_members()
        return is_ready

    def _use(self, addresses: list[Address]) -> None:
        """Sends calls to these servers from now on; the calls that others have in flight finish."""
        with self._mutex:
            self._subset.set(addresses)
        self._choose_members()

    def _choose_members(self) -> None:
        """Uses those servers of the fleet that its subset consists of now."""
        with self._mutex:
            if self._closed:
                return
            before = self._servers
            members = self._subset.members(before)
            is_first = not before
            try:
                new = {address: self._upstream(address, is_up=is_first) for address in members if address not in before}
            except Exception:  # such as a certificate that cannot be read now
                if is_first:
                    raise
                return
            known = before | new
            self._servers = {address: known[address] for address in members}
            gone = [server for address, server in before.items() if address not in self._servers]
            for server in gone:
                server.retired.set()
            self._leaving.update(gone)
            idle = [server for server in self._leaving if not server.in_flight]
            self._leaving.difference_update(idle)
            self._list_usable()
            # Also those that Ctrl-C kept from being probed the last time.
            unknown = [server for server in self._servers.values() if not (server.is_up or server.is_probed)]
        for server in idle:
            server.selector.close()
        for server in unknown:
            with self._mutex:
                if not self._begin_to_probe(server):
                    self._mark(server, is_up=True)

    def _upstream(self, address: Address, *, is_up: bool) -> Upstream:
        alive = weakref.ref(self)  # not self, which the selector would keep

        def has_others() -> bool:
            balancer = alive()
            return balancer is not None and not balancer._servers.keys() <= {address}  # it may have left itself

        return Upstream(self._connect(address.target, address.hostname, has_others), is_up=is_up)

    def _begin_to_probe(self, server: Upstream) -> bool:
        """Has a thread probe a server, unless one does; the mutex is held.

        Returns:
            False if the system has no more threads: calls find out whether the server is up.
        """
        if not server.is_probed:
            thread = threading.Thread(
                target=_probe_until_up, args=(weakref.ref(self), server), name="bngrad-probe", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:
                return False
            server.is_probed = True
        return True

    def _mark(self, server: Upstream, *, is_up: bool, has_failed: bool = False) -> None:
        """Marks a server as up or down; the mutex is held."""
        server.is_up, server.has_failed = is_up, has_failed
        self._list_usable()

    def _count_again(self) -> int:
        """Returns how many calls are in flight, and corrects the count; the mutex is held."""
        self._in_flight = sum(server.in_flight for server in (*self._servers.values(), *self._leaving))
        return self._in_flight

    def _list_usable(self) -> None:
        servers = list(self._servers.values())
        self._usable = [each for each in servers if each.is_up] or servers

    def _note(self, server: Upstream, load: LoadReport) -> None:
        """Takes a report into account; the mutex is held."""
        own = server.note(load, self._calls)
        if own is not None:
            self._others += NEWEST_PART * (1 - own - self._others)
        if load.capacity is not None:
            usual = self._usual_capacity
            self._usual_capacity = load.capacity if usual is None else usual + NEWEST_PART * (load.capacity - usual)


def _is_ready(selector: Selector) -> bool:
    """Asks a server whether a worker of its is ready."""
    try:
        devices = selector.server_info(Deadline.after(_PROBE_TIMEOUT_S), Cancellation(only_by_close=True)).devices
    except (UnavailableError, DeadlineExceededError):
        return False
    except Exception:  # The server answered; or the next call will raise the same, such as for a missing token.
        return True
    return not devices or any(device.state == "ready" for device in devices)


def _probe_until_up(load_balancer: weakref.ref[LoadBalancer], server: Upstream) -> None:
    """Probes a server that is marked down until it is up or the client has gone, even if it was never closed."""
    for failures in itertools.count(server.strikes):
        if server.retired.wait(delay_s(failures) if failures else 0.0):
            return
        alive = load_balancer()
        if alive is None or alive.probe(server):
            return
        del alive
