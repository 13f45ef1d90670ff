"""When a call must have ended."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

_LONGEST_TIMEOUT_S = 10 * 365 * 86400.0
"""Longer ones overflow gRPC's clock."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """When a call must have ended.

    Attributes:
        timeout: The seconds that the call was given.
        at: On the monotonic clock; None for never.
    """

    timeout: float
    at: float | None

    @classmethod
    def after(cls, timeout: float) -> Deadline:
        """The deadline of a call that begins now."""
        endless = timeout > _LONGEST_TIMEOUT_S or math.isinf(timeout)
        return cls(timeout, None if endless else time.monotonic() + timeout)

    def rest_s(self) -> float | None:
        """The seconds that are left, at least a moment; None for no limit."""
        return None if self.at is None else max(self.at - time.monotonic(), 1e-3)

    def allows(self, seconds: float) -> bool:
        """Whether it is further away than that."""
        return self.at is None or time.monotonic() + seconds < self.at


ENDLESS = Deadline(math.inf, None)
