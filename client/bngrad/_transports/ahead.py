"""Sends tensors ahead of the calls that need them to one server, over our own HTTP/2."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence

from bngrad._deadline import Cancellation, Deadline
from bngrad._errors import BngradError, ResourceExhaustedError, UnimplementedError
from bngrad._requests import codec
from bngrad._requests.request import SEND_AHEAD_METHOD
from bngrad._transports.connection_pool import NoConnectionYetError, NotConnectedError
from bngrad._transports.http2 import Http2Transport
from bngrad.typing import Array

_PAUSE_S = 1.0
_UNIMPLEMENTED_PAUSE_S = 300.0


class AheadConnection:
    """A connection of its own, since the server keeps the tensors as long as it; one thread sends."""

    def __init__(self) -> None:
        """Connects to nothing yet."""
        self._mutex = threading.Lock()
        self._calls: Http2Transport | None = None
        self._transport: Http2Transport | None = None
        self._closed = False
        self._paused_until = -math.inf
        self._was_full = False

    def send(
        self,
        calls: Http2Transport,
        tensor: Array | None,
        forget: Sequence[bytes],
        deadline: Deadline,
        cancellation: Cancellation,
        place: tuple[bytes, int] | None = None,
    ) -> bytes:
        """Sends a tensor in C order, and has the server forget others; returns its ticket.

        After a failure, none is sent for a second, or until the server has forgotten some if it was full.

        Args:
            calls: The transport of the calls that need it.
            tensor: The tensor; None to forget others alone.
            forget: Their tickets.
            deadline: When to give up.
            cancellation: Lets another thread end it.
            place: Where the tensor lies in shared memory, the key of its region and the offset; it is then not sent,
                but has a ticket once a GPU copies it.

        Returns:
            The ticket; empty if there was no tensor, calls send it themselves, or no GPU copies it.

        Raises:
            BngradError: The server's status, as an error.
            NotConnectedError: The server cannot be reached.
        """
        if forget and self._was_full:
            self._paused_until = -math.inf
        is_paused = time.monotonic() < self._paused_until
        if tensor is not None and (tensor.nbytes < Http2Transport.unary_below_nbytes or is_paused):
            tensor = None
        if tensor is None and not forget:
            return b""
        message = codec.ahead_message(tensor, place, forget)
        elements = memoryview(b"") if tensor is None or place is not None else codec.view_of(tensor)
        try:
            transport = self._twin_of(calls)
            response = transport.send_ahead(SEND_AHEAD_METHOD, message, elements, deadline, cancellation)
        except NoConnectionYetError:
            raise  # the next one may find it
        except (BngradError, NotConnectedError) as error:
            self._was_full = isinstance(error, ResourceExhaustedError)
            is_unknown = isinstance(error, UnimplementedError)
            self._paused_until = time.monotonic() + (_UNIMPLEMENTED_PAUSE_S if is_unknown else _PAUSE_S)
            raise
        return codec.read_ticket(response)

    def forget(self, tickets: Sequence[bytes], deadline: Deadline, cancellation: Cancellation) -> None:
        """Has the server forget tensors, by the connection that they were sent on; raises the errors of `send`."""
        if self._calls is not None:
            self.send(self._calls, None, tickets, deadline, cancellation)

    def close(self) -> None:
        """Closes the connection, so that the server forgets the tensors."""
        with self._mutex:
            self._closed = True
            if self._transport is not None:
                self._transport.close()

    def _twin_of(self, calls: Http2Transport) -> Http2Transport:
        with self._mutex:
            if self._closed:
                raise NotConnectedError("the client was closed")
            if self._transport is None or self._calls is not calls:
                if self._transport is not None:
                    self._transport.close()
                self._calls, self._transport = calls, calls.twin()
            return self._transport
