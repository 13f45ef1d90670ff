"""Decides whether and when a failed call is repeated. Every call is a pure function of its request, so it may be."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Hashable

from bngrad._deadline import Cancellation, Deadline
from bngrad._errors import BngradError, NotSharedError, ResourceExhaustedError, UnavailableError

FIRST_DELAY_S = 0.05
LONGEST_DELAY_S = 2.0
_DOUBLINGS = math.ceil(math.log2(LONGEST_DELAY_S / FIRST_DELAY_S))
_MAX_ENDLESS_ATTEMPTS = 5
"""How often an unavailable server is tried by a call without a deadline."""
_MAX_FULL_ATTEMPTS = 6
"""How often a server is asked for memory to share that has leased all, which takes about a second."""


def delay_s(failures: int, hint_s: float | None = None) -> float:
    """Returns how long to wait before the next attempt, in seconds.

    The wait is random, so that callers that failed together do not come back together.

    Args:
        failures: How many attempts have failed; at least 1.
        hint_s: How long the server says to wait.
    """
    longest = min(FIRST_DELAY_S * 2 ** min(failures - 1, _DOUBLINGS), LONGEST_DELAY_S)
    delay = random.uniform(0, longest)  # noqa: S311 - not a secret
    return delay if hint_s is None else max(delay, hint_s * random.uniform(1, 1.25))  # noqa: S311


class RetryBudget:
    """Stops a client's retries in a long outage, which they would make worse.

    A failure takes one token, divided by the number of calls in flight; a success adds a tenth of one. Below half of
    the tokens nothing is repeated. That is after about thirty failures in a row of each caller, or half a minute.
    """

    tokens = 60.0

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._left = self.tokens

    @property
    def allows(self) -> bool:
        """Whether calls may be repeated now."""
        return self._left >= self.tokens / 2

    def failed(self, in_flight: int) -> None:
        """Records a call that failed, one of those in flight."""
        with self._mutex:
            self._left = max(self._left - 1 / max(in_flight, 1), 0.0)

    def succeeded(self) -> None:
        """Records a call that was answered."""
        if self._left < self.tokens:
            with self._mutex:
                self._left = min(self._left + 0.1, self.tokens)


class Attempts:
    """The attempts of one call, once its first has failed."""

    def __init__(self, deadline: Deadline, started_at: float, patience_s: float = math.inf) -> None:
        """Begins to count.

        Args:
            deadline: The deadline of the call.
            started_at: When it began, on the monotonic clock.
            patience_s: For how long after that it is repeated where no server is available, in seconds.
        """
        self._deadline = deadline
        self._started_at = started_at
        self._gives_up_at = started_at + patience_s
        self._count = 0
        self._failures: dict[Hashable, int] = {}
        self._ready_at: dict[Hashable, float] = {}
        self._last: BngradError | None = None

    def failed(self, server: Hashable, error: BngradError) -> None:
        """Records the error of an attempt; raises it if another attempt cannot help."""
        self._count += 1
        failures = self._failures[server] = self._failures.get(server, 0) + 1
        hint_s = error.retry_delay_s if isinstance(error, ResourceExhaustedError) else None
        if isinstance(error, NotSharedError) and not (error.is_full and failures < _MAX_FULL_ATTEMPTS):
            self._ready_at[server] = math.inf
        elif isinstance(error, UnavailableError) or hint_s is not None:
            self._ready_at[server] = time.monotonic() + delay_s(failures, hint_s)
        else:
            try:
                raise self._with_attempts(error)
            finally:
                del error  # breaks the cycle of the error and this frame, which would keep the call's tensors
        self._last = _without_frames(error)

    def excluded(self, is_hopeless: bool) -> set[Hashable]:
        """Returns the servers that must not be tried yet, or again if trying again would be hopeless."""
        if self._gives_up(is_hopeless):
            return set(self._ready_at)
        now = time.monotonic()
        return {server for server, at in self._ready_at.items() if at > now}

    def wait(self, is_hopeless: bool, cancellation: Cancellation) -> None:
        """Waits until a server may be tried again; raises the last error if that would not help or be hopeless."""
        now = time.monotonic()
        seconds = min((at - now for at in self._ready_at.values() if at > now), default=0.0)
        if self._gives_up(is_hopeless) or seconds == math.inf or not self._deadline.allows(seconds):
            raise self._take_last()
        cancellation.sleep(seconds)
        if cancellation.cancelled:
            raise self._take_last()

    def _gives_up(self, is_hopeless: bool) -> bool:
        if not isinstance(self._last, UnavailableError):
            return False
        if time.monotonic() >= self._gives_up_at:
            return True
        return is_hopeless or (self._deadline.at is None and min(self._failures.values()) >= _MAX_ENDLESS_ATTEMPTS)

    def _take_last(self) -> BngradError:
        """Returns the last error and forgets it, so that only the caller refers to it."""
        error, self._last = self._last, None
        assert error is not None
        return self._with_attempts(error)

    def _with_attempts(self, error: BngradError) -> BngradError:
        """Returns the error; if earlier attempts failed, its message says how many."""
        if self._count > 1:
            tried = f"{self._count} attempts in {time.monotonic() - self._started_at:.1f} s"
            if self._last is not None and type(self._last) is not type(error):
                tried += f", before this one: {self._last}"
            error.args = (f"{error} ({tried})", *error.args[1:])
        return error


def _without_frames(error: BngradError) -> BngradError:
    """Removes the tracebacks of an error and of its causes: their frames would keep the tensors of its call."""
    each: BaseException | None = error
    while each is not None:
        each.__traceback__ = None
        each = each.__cause__ or each.__context__
    return error
