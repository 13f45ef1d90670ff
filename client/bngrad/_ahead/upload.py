"""A tensor on its way to a server, ahead of the calls that need it."""

from __future__ import annotations

import enum
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from bngrad._deadline import Cancellation, Deadline
from bngrad.typing import Array


class Server(Protocol):
    """Makes the calls to one server; see `bngrad._transports.selector.TransportSelector`."""

    def send_ahead(
        self, tensor: Array | None, forget: Sequence[bytes], deadline: Deadline, cancellation: Cancellation
    ) -> Place | None:
        """Sends a tensor ahead, and has the server forget others."""
        ...

    def copy_to_gpu(self, copy: Array, deadline: Deadline, cancellation: Cancellation) -> bytes:
        """Has a GPU copy a tensor that lies in shared memory; returns the ticket of the copy, if there is one."""
        ...


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor is that was sent ahead.

    Attributes:
        server: Makes the calls to its server.
        ticket: What calls to this server name it by; of a copy in shared memory, that of a GPU's copy, or empty.
        copy: The copy in memory that is shared with this server, if there is one.
    """

    server: Server
    ticket: bytes = b""
    copy: Array | None = None


class _State(enum.Enum):
    QUEUED = enum.auto()
    SENDING = enum.auto()
    ENDED = enum.auto()


class Upload:
    """A tensor that waits to be sent ahead, is being sent, or was sent.

    Attributes:
        server: Makes the calls to the server that it goes to, once that is chosen.
    """

    def __init__(self, tensor: Array, on_forget: Callable[[Place], object]) -> None:
        """Waits to be sent.

        Args:
            tensor: The tensor, in C order.
            on_forget: Called with a place in a server that is needed no longer; in any thread, at any moment.
        """
        self.server: Server | None = None
        self._tensor: Array | None = tensor
        self._on_forget = on_forget
        self._state = _State.QUEUED
        self._place: Place | None = None
        self._is_wanted = True
        self._process = os.getpid()
        # Reentrant, since the garbage collector may run `close` in a thread that has it. It is not taken by way of the
        # condition: that runs Python code, and Ctrl-C amid it would leave the mutex taken.
        self._mutex = threading.RLock()
        self._changed = threading.Condition(self._mutex)

    def begin(self, server: Server) -> Array | None:
        """Returns the tensor, which is sent now, until `end`; None if it need not be sent any longer."""
        with self._mutex:
            tensor, self._tensor = self._tensor, None
            if tensor is not None:
                self.server, self._state = server, _State.SENDING
            return tensor

    def end(self, place: Place | None) -> None:
        """Ends the sending; the place is None if it failed."""
        with self._mutex:
            self._state = _State.ENDED
            self._place = place
            self._changed.notify_all()
        if not self._is_wanted:
            self.forget()

    @property
    def copy(self) -> Array | None:
        """The copy in shared memory, if there is one and it is still needed."""
        place = self._place
        return None if place is None else place.copy

    def add_ticket(self, ticket: bytes) -> None:
        """Adds the ticket of a GPU's copy of `copy`; has the server forget that if it is needed no longer."""
        with self._mutex:
            place = self._place
            if place is not None:
                self._place = replace(place, ticket=ticket)
        if place is None and self.server is not None:
            self._on_forget(Place(self.server, ticket))

    def place(self, server: Server, deadline: Deadline, cancellation: Cancellation) -> Place | None:
        """Returns where the tensor is in a server; None if the call must send it itself.

        Waits while it is being sent there. If it still waits for that, it will not be sent ahead.
        """
        with self._mutex:
            if self._state is _State.QUEUED:
                self._tensor, self._state = None, _State.ENDED
            if self.server is not server:
                return None
            if self._state is _State.ENDED:
                return self._place
        with cancellation.calls(self._wake), self._mutex:
            self._changed.wait_for(
                lambda: self._state is _State.ENDED or cancellation.cancelled, deadline.remaining_s()
            )
            return self._place

    def forget(self) -> None:
        """Has the server forget the tensor, or finds that it has."""
        with self._mutex:
            place, self._place = self._place, None
        if place is not None and place.ticket:
            self._on_forget(replace(place, copy=None))  # so that its memory is free at once

    def close(self) -> None:
        """Has the server forget the tensor, also if it is only being sent now; does nothing in a forked child."""
        if self._process != os.getpid():  # a thread of the parent may have held the mutex at the fork
            return
        with self._mutex:
            self._is_wanted = False
            self._tensor = None
        self.forget()

    def _wake(self) -> None:
        with self._mutex:
            self._changed.notify_all()
