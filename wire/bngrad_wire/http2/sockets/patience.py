"""How long a thread waits for a peer, and whether that still makes sense."""

from __future__ import annotations

import math
import time

from bngrad_wire.http2.errors import PeerGoneError


class Patience:
    """The limits of every wait for a peer.

    Attributes:
        broken: Why the connection is unusable; None while it is usable.
        deadline: When to give up, on the monotonic clock, a peer that sends or reads a little now and then, so that
            no single wait times out.
        waits: How many timeouts in a row make a `TimeoutError`. With several short ones, `interrupt` ends a wait early,
            and so does a peer whose host has gone.
        moved: How many bytes have been received and sent.
    """

    def __init__(self) -> None:
        self.broken: str | None = None
        self.deadline = math.inf
        self.waits = 1
        self.moved = 0

    def interrupt(self) -> None:
        """Makes a thread that receives, or will do so, raise TimeoutError; from any thread, until `resume`."""
        self.deadline = -math.inf

    def resume(self) -> None:
        """Allows to receive again after `interrupt`."""
        if self.deadline == -math.inf:
            self.deadline = math.inf

    def check(self) -> None:
        """Raises `PeerGoneError` if the connection is unusable."""
        if self.broken is not None:
            raise PeerGoneError(f"the connection is unusable: {self.broken}")

    def check_deadline(self) -> None:
        """Makes the connection unusable and raises TimeoutError if `deadline` has passed amid a message."""
        if time.monotonic() > self.deadline:
            self.broken = "sending timed out"
            raise TimeoutError(self.broken)
