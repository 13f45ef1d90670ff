"""Whether and when a call that failed is made again. Every call is a pure function of its request, so it may be."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Hashable

from bngrad._cancellation import Cancellation
from bngrad._deadline import Deadline
from bngrad._errors import BngradError, NotSharedError, ResourceExhaustedError, UnavailableError

FIRST_DELAY_S = 0.05
LONGEST_DELAY_S = 2.0
_DOUBLINGS = math.ceil(math.log2(LONGEST_DELAY_S / FIRST_DELAY_S))
_ENDLESS_ATTEMPTS = 5
"""How often a server is tried that stays away, where no deadline ends that."""


def delay_s(failures: int, hint_s: float | None = None) -> float:
    """How long to wait before the next attempt, in seconds.

    The wait is random, so that callers who failed together do not come back together.

    Args:
        failures: How many attempts have failed, at least one.
        hint_s: How long the server says to wait.
    """
    longest = min(FIRST_DELAY_S * 2 ** min(failures - 1, _DOUBLINGS), LONGEST_DELAY_S)
    delay = random.uniform(0, longest)  # noqa: S311 - nobody gains by guessing it
    return delay if hint_s is None else max(delay, hint_s * random.uniform(1, 1.25))  # noqa: S311


class Budget:
    """Ends a client's repeating where it comes to nothing, lest an outage becomes worse by it.

    A failure takes one token, shared among the calls that are under way; a success brings a tenth of one. Below half of
    the tokens, nothing is repeated: about thirty failures in a row of each caller, or half a minute.
    """

    tokens = 60.0

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._left = self.tokens

    @property
    def allows(self) -> bool:
        """Whether calls may be repeated now."""
        return self._left >= self.tokens / 2

    def failed(self, callers: int) -> None:
        """Takes note of a call that failed among several under way."""
        with self._mutex:
            self._left = max(self._left - 1 / max(callers, 1), 0.0)

    def succeeded(self) -> None:
        """Takes note of an answer."""
        if self._left < self.tokens:
            with self._mutex:
                self._left = min(self._left + 0.1, self.tokens)


class Attempts:
    """The attempts of one call that has failed once.

    Args:
        deadline: The call's.
        began: When it began, on the monotonic clock.
    """

    def __init__(self, deadline: Deadline, began: float) -> None:
        self._deadline = deadline
        self._began = began
        self._count = 0
        self._failures: dict[Hashable, int] = {}
        self._ready_at: dict[Hashable, float] = {}
        self._last: BngradError | None = None

    def failed(self, server: Hashable, error: BngradError) -> None:
        """Takes note of an attempt's error; raises it if no other attempt can help."""
        self._count += 1
        failures = self._failures[server] = self._failures.get(server, 0) + 1
        hint_s = error.retry_delay_s if isinstance(error, ResourceExhaustedError) else None
        if isinstance(error, NotSharedError):
            self._ready_at[server] = math.inf
        elif isinstance(error, UnavailableError) or hint_s is not None:
            self._ready_at[server] = time.monotonic() + delay_s(failures, hint_s)
        else:
            try:
                raise self._told(error)
            finally:
                del error  # or it would keep itself, and the call's tensors, until the garbage is collected
        self._last = error.with_traceback(None)  # whose frames have this object: another such cycle

    def waiting(self) -> set[Hashable]:
        """The servers that are not to be tried yet."""
        now = time.monotonic()
        return {server for server, at in self._ready_at.items() if at > now}

    def wait(self, is_hopeless: bool, cancellation: Cancellation) -> None:
        """Waits until a server may be tried again; raises the last error where that is no use.

        Args:
            is_hopeless: Whether a server that is not available need not be waited for.
            cancellation: Ends the wait.
        """
        now = time.monotonic()
        seconds = min((at - now for at in self._ready_at.values() if at > now), default=0.0)
        if isinstance(self._last, UnavailableError):
            tried = min(self._failures.values())
            is_hopeless |= self._deadline.at is None and tried >= _ENDLESS_ATTEMPTS
        else:
            is_hopeless = False
        if is_hopeless or cancellation.cancelled or seconds == math.inf or not self._deadline.allows(seconds):
            raise self._given_up()
        cancellation.sleep(seconds)
        if cancellation.cancelled:
            raise self._given_up()

    def _given_up(self) -> BngradError:
        """The last error, which is nobody's then but the caller's."""
        error, self._last = self._last, None
        assert error is not None
        return self._told(error)

    def _told(self, error: BngradError) -> BngradError:
        """The error, which tells of the attempts before if there were any."""
        if self._count > 1:
            tried = f"{self._count} attempts in {time.monotonic() - self._began:.1f} s"
            if self._last is not None and type(self._last) is not type(error):
                tried += f", before this one: {self._last}"
            error.args = (f"{error} ({tried})", *error.args[1:])
        return error
