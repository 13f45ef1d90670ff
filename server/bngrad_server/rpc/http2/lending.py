"""Connections and lanes that threads have, since an action of theirs may wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from bngrad_server.rpc.http2.connection import Caller, Connection, Lane
from bngrad_server.runtime.event_loop import EventLoop
from bngrad_server.runtime.executors import OnDemandExecutor


class Lending:
    """The callers that threads have; for the event loop's thread.

    Attributes:
        threads: The threads.
    """

    def __init__(
        self,
        event_loop: EventLoop,
        on_failure: Callable[[Caller, Exception], None],
        on_return: Callable[[Caller, bool], None],
    ) -> None:
        """Lends none yet.

        Args:
            event_loop: Gets them back.
            on_failure: Called in a thread with a caller whose action has failed.
            on_return: Called in the event loop with a caller that is back, and whether its action has not failed.
        """
        self.threads = OnDemandExecutor("http2-call")
        self._event_loop = event_loop
        self._on_failure = on_failure
        self._on_return = on_return
        self._all: set[Caller] = set()

    def __contains__(self, caller: Caller) -> bool:
        return caller in self._all

    def __iter__(self) -> Iterator[Caller]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def lend(self, caller: Caller, action: Callable[[], None]) -> None:
        """Lends a caller, which the event loop no longer watches, to a thread for an action."""
        if isinstance(caller, Lane):
            caller.lane.lend()
        caller.carrier.blocking = True
        self._all.add(caller)
        self.threads.submit(partial(self._run, caller, action))

    def _run(self, caller: Caller, action: Callable[[], None]) -> None:
        is_usable = False
        try:
            action()
            is_usable = True
        except Exception as error:
            self._on_failure(caller, error)
            if isinstance(caller, Lane) and isinstance(error, MemoryError):
                caller.lane.lose("there is no memory to answer it")  # so the client calls again
        finally:
            self._event_loop.call_soon(partial(self._return, caller, is_usable))

    def _return(self, caller: Caller, is_usable: bool) -> None:
        self._all.discard(caller)
        if is_usable:
            caller.carrier.blocking = False
            if isinstance(caller, Lane):
                caller.lane.is_lent = False
            if isinstance(caller, Connection):
                caller.waste.begin_reading()
        self._on_return(caller, is_usable)

    def discard(self, caller: Caller) -> None:
        """Forgets a caller that is no longer of the port."""
        self._all.discard(caller)
