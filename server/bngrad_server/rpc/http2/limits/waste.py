"""The time that connections cost without a good call, and how those that cost too much are paused.

A paused connection waits in the kernel, and all paused ones together get a small share of the event loop's time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from bngrad_wire import http2

_ALLOWANCE_S = 1e-3
"""How long a connection may keep the event loop busy after its last good call, before it is paused."""
_ALLOWED_SHARE = 1e-4
"""What that grows by, for keepalive and the like."""
OTHER_WEIGHT = 0.1
"""The part of the time for a good call that is no op which counts as wasted: a flood of them is paused, too."""
_DISCARDABLE_NBYTES = 2**28
"""How much of an upload that was refused is read, and discarded, without counting as wasted time."""
_LEAST_NBYTES = 1024
"""What each read counts for at least."""
_PAUSED_SHARE = 0.1
"""The share of the event loop's time that paused connections get together."""


class Waste:
    """How long a connection has kept the event loop busy for nothing since its last good call.

    Attributes:
        total_s: How long in all.
        last_s: How long at the last time.
    """

    def __init__(self, http: http2.ServerConnection) -> None:
        self.total_s = self.last_s = 0.0
        self._http = http
        self._useful_at = time.perf_counter()
        self._discardable_nbytes = 0
        self.begin_reading()

    def begin_reading(self) -> None:
        """Counts what is received from now on."""
        self._moved, self._frame_budget = self._http.io.moved, self._http.frame_budget

    def reset(self, began: float) -> None:
        """Forgets all waste, for a good call that began then."""
        self.total_s, self._useful_at = 0.0, began
        self._discardable_nbytes = _DISCARDABLE_NBYTES
        self._frame_budget = self._http.frame_budget

    def count(self, began: float, weight: float = 1.0) -> bool:
        """Counts the time since ``began``, or a part of it, as wasted, and returns whether that is too much."""
        has_only_discarded = self._http.frame_budget >= self._frame_budget and self._discardable_nbytes > 0
        self._discardable_nbytes -= max(self._http.io.moved - self._moved, _LEAST_NBYTES)
        self.begin_reading()
        if has_only_discarded and weight == 1:  # not what was answered
            return False
        now = time.perf_counter()
        self.last_s = (now - began) * weight
        self.total_s += self.last_s
        return self.total_s > _ALLOWANCE_S + _ALLOWED_SHARE * (now - self._useful_at)


class _Wasteful(Protocol):
    @property
    def waste(self) -> Waste: ...


Member = TypeVar("Member", bound=_Wasteful)


class Paused(Generic[Member]):
    """The paused connections: those that wait for a share of the event loop's time, and those suspended for a time."""

    def __init__(self) -> None:
        self._members: dict[Member, None] = {}  # the one that waits longest comes first
        self._suspended: dict[Member, float] = {}  # and until when
        self._budget_s = 0.0
        self._earned_at = time.monotonic()

    def __contains__(self, member: Member) -> bool:
        return member in self._members or member in self._suspended

    def add(self, member: Member) -> None:
        """Pauses a connection until it may have some of the time."""
        self._members[member] = None

    def suspend(self, member: Member, delay_s: float) -> None:
        """Pauses a connection for a time, whatever else pauses it."""
        self._suspended[member] = time.monotonic() + delay_s

    def discard(self, member: Member) -> None:
        """Forgets a connection, if it is paused."""
        self._members.pop(member, None)
        self._suspended.pop(member, None)

    def resume(self) -> Iterator[Member]:
        """Resumes those whose time is over, and as many others as the time since the last call allows.

        Each of these takes as much of it as it cost last.
        """
        now = time.monotonic()
        for member in [member for member, until in self._suspended.items() if until <= now]:
            del self._suspended[member]
            if member not in self._members:
                yield member
        self._budget_s = min(self._budget_s, 0.0) + (now - self._earned_at) * _PAUSED_SHARE
        self._earned_at = now
        while self._members and self._budget_s > 0:
            member = next(iter(self._members))
            del self._members[member]
            self._budget_s -= member.waste.last_s
            yield member
