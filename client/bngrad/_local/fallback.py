"""Decides which calls are computed in this process because no server answers."""

from __future__ import annotations

import logging
import threading
import time

from bngrad._errors import BngradError, DeadlineExceededError, NotSharedError, ResourceExhaustedError, UnavailableError
from bngrad._local.kernels import LocalKernels

logger = logging.getLogger("bngrad")

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0


class Fallback:
    """The outage of a client's servers, if there is one.

    It begins with a call that no server took, or with two in a row whose deadlines passed: one may have been too short.
    These are repeated for some seconds. From then on calls are computed here at once, but for one after each pause,
    which makes one attempt; the pauses grow from a second to a minute. The outage ends with an answer.

    Attributes:
        kernels: Computes the calls.
        calls: How many calls were computed here.
        in_outage: Whether the last call that asked the servers got no answer.
    """

    def __init__(self, name: str) -> None:
        """Names the client for the log."""
        self.kernels = LocalKernels()
        self.calls = 0
        self.in_outage = False
        self._was_in_outage = self._was_late = False
        self._name = name
        self._pause_s = _FIRST_PAUSE_S
        self._pause_ends_at = 0.0
        self._mutex = threading.Lock()

    @staticmethod
    def covers(error: BngradError) -> bool:
        """Returns whether a call failed since no server took it, rather than for what it asks."""
        if isinstance(error, ResourceExhaustedError):
            return error.retry_delay_s is not None
        return isinstance(error, UnavailableError | DeadlineExceededError) and not isinstance(error, NotSharedError)

    def is_pausing(self) -> bool:
        """Returns whether the servers need not be asked for this call; false begins the next pause in an outage."""
        if not self.in_outage:
            return False
        with self._mutex:
            now = time.monotonic()
            if now < self._pause_ends_at:
                return True
            self._pause_ends_at = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            return False

    def failed(self, error: BngradError) -> None:
        """Records that no server answered; logs the first outage."""
        with self._mutex:
            was_late, self._was_late = self._was_late, isinstance(error, DeadlineExceededError)
            if self._was_late and not was_late:
                return
            is_first, self._was_in_outage = not self._was_in_outage, True
            if not self.in_outage:
                self.in_outage = True
                self._pause_ends_at = time.monotonic() + self._pause_s
        if is_first:
            logger.warning("%s computes calls in this process while no server answers: %s", self._name, error)

    def answered(self) -> None:
        """Records that a server answered."""
        self._was_late = False
        if self.in_outage:
            with self._mutex:
                self.in_outage = False
                self._pause_s = _FIRST_PAUSE_S

    def count(self) -> None:
        """Counts a call that is computed here."""
        with self._mutex:
            self.calls += 1
