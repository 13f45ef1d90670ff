"""What connections may send: by the messages of their ops, and in an account for each client.

Where clients are authenticated, all connections of one share an account, so that a new connection does not bring a new
allowance. Messages of ops that fail by the client's own doing explain nothing.
"""

from __future__ import annotations

import math
import threading
from types import TracebackType
from typing import NamedTuple

from bngrad_server.telemetry.load import LoadListener

_RATE = 2.0**16
"""Bytes a second that a connection may send beyond its messages."""
_MOST_RATES = 16
"""How many connections of an account may send as much."""
_KNOWN_NBYTES = 2.0**24
"""How much a client with ops may send at once beyond its messages, such as those that wait for a thread."""
_OP_NBYTES = 4096
"""What an op counts for beside its messages: for its client if it is answered, against it if it is futile."""
_BEGINNING_NBYTES = 2**16
"""How much of a message may arrive before the server begins to receive it."""
_PAUSE_S = 0.5
"""How long connections are paused at first, doubled by each strike; then they take up to as long again to send."""
_MAX_STRIKES = 4
_STRIKE_S = 8.0
"""After how long without another one a client's last strike is forgotten."""


class Peer:
    """A connection, as its calls see it; or all connections of a Unix socket, which have one name in grpcio.

    Attributes:
        useful: Bytes of the messages of its ops so far, and what these count for.
        waiting: Ops whose messages may not arrive yet, but for their beginnings.
        receiving: Ops whose next message may be arriving.
        account: The account of its client, once an op was begun; empty before.
        load_listener: What it was told of the server's load.
    """

    def __init__(self, name: str) -> None:
        self.useful = 0
        self.waiting = 0
        self.receiving = 0
        self.account = ""
        self.load_listener = LoadListener(is_several=name.startswith("unix:"))
        self._name = name
        self._mutex = threading.Lock()

    def op(self, client: str | None) -> OpTraffic:
        """Begins an op of an authenticated client; None for one that is not, whose connection is its account."""
        self.account = client or self._name
        return OpTraffic(self)

    def count(self, nbytes: int = 0, *, waiting: int = 0, receiving: int = 0) -> None:
        """Adds to what its ops have sent and to their numbers; for any thread."""
        with self._mutex:
            self.useful += nbytes
            self.waiting += waiting
            self.receiving += receiving


class OpTraffic:
    """The messages of one op of a connection, for the time that it is used as a context manager."""

    __slots__ = ("_is_receiving", "_nbytes", "_peer")

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._nbytes = 0
        self._is_receiving = False

    def __enter__(self) -> OpTraffic:
        self._peer.count(waiting=1)
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_receiving:
            self._peer.count(receiving=-1)
        else:
            self._peer.count(waiting=-1)

    def begin_to_receive(self) -> None:
        """Expects messages from now on."""
        self._is_receiving = True
        self._peer.count(waiting=-1, receiving=1)

    def received(self, nbytes: int) -> None:
        """Counts a message."""
        self._nbytes += nbytes
        self._peer.count(nbytes)

    def answered(self) -> None:
        """Counts an answer to the messages so far."""
        self._nbytes = 0
        self._peer.count(_OP_NBYTES)

    def was_refused(self) -> None:
        """Excuses what the client has sent of a call that the server has no room for."""
        self._peer.count(_BEGINNING_NBYTES // 2)

    def was_futile(self) -> None:
        """Takes back what the messages since the last answer counted for: the client has cancelled them, or erred."""
        self._peer.count(-self._nbytes - _OP_NBYTES)


class Excess(NamedTuple):
    """What a connection has sent, in bytes, beyond what its messages explain."""

    fd: int
    name: str
    nbytes: float


class Account:
    """What the connections of a client may send.

    Attributes:
        waiting: Their ops whose messages may not arrive yet, as found since it was last settled.
        receiving: Their ops whose next message may be arriving.
        excesses: What the connections that are not paused have sent since then.
        paused_until: When the pause of all its connections ends, on the monotonic clock; may be over.
    """

    def __init__(self, now: float) -> None:
        self.waiting = 0
        self.receiving = 0
        self.excesses: list[Excess] = []
        self.paused_until = -math.inf
        self._level = _KNOWN_NBYTES
        self._settled_at = now
        self._strikes = 0
        self._struck_at = -math.inf

    def settle(self, now: float, max_message_nbytes: float, max_nbytes: float) -> list[Excess]:
        """Counts what was sent; returns the connections to be paused, those that have sent most, if it is too much."""
        excesses, self.excesses = self.excesses, []
        arriving = self.waiting * _BEGINNING_NBYTES + min(self.receiving * max_message_nbytes, max_nbytes)
        self.waiting = self.receiving = 0
        earned = _RATE * min(len(excesses), _MOST_RATES) * (now - self._settled_at)
        total = sum(excess.nbytes for excess in excesses)
        self._level, self._settled_at = min(self._level + earned - total, _KNOWN_NBYTES), now
        if self._level >= -arriving / 4 ** self.strikes(now) or total <= 0:
            return []
        self._level = 0.0
        return [excess for excess in excesses if excess.nbytes >= total / len(excesses) / 2]

    def strike(self, now: float) -> float:
        """Counts a pause, and returns how long it takes."""
        strikes = self.strikes(now)
        self._strikes, self._struck_at = min(strikes + 1, _MAX_STRIKES), now
        return float(_PAUSE_S * 2**strikes)

    def pause(self, now: float) -> None:
        """Pauses all its connections, later ones too; does nothing while they are."""
        if now >= self.paused_until:
            self.paused_until = now + self.strike(now)

    def strikes(self, now: float) -> int:
        """Returns how often its connections were paused lately."""
        return max(0, self._strikes - int(min((now - self._struck_at) / _STRIKE_S, _MAX_STRIKES)))
