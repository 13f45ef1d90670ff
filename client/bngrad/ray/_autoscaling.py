"""How many replicas there should be."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import NamedTuple


class AutoscalingPolicy(NamedTuple):
    """When to start and stop replicas; the names and defaults of the delays are those of Ray Serve.

    Attributes:
        min_replicas: The fewest replicas.
        max_replicas: The most replicas.
        target_ongoing_requests: How many requests a replica should have, waiting or being computed.
        upscale_delay_s: How long more must have been needed all the time before replicas are started.
        downscale_delay_s: How long fewer would have done all the time before replicas are stopped.
    """

    min_replicas: int
    max_replicas: int
    target_ongoing_requests: float
    upscale_delay_s: float
    downscale_delay_s: float


class Autoscaler:
    """Follows the number of requests."""

    def __init__(self, policy: AutoscalingPolicy) -> None:
        self._policy = policy
        self._started_at = time.monotonic()
        self._wanted: deque[tuple[float, int]] = deque()

    def replicas(self, current: int, requests: float) -> int:
        """Returns how many replicas there should be.

        Args:
            current: How many there are.
            requests: How many requests all of them have.
        """
        policy, now = self._policy, time.monotonic()
        wanted = math.ceil(requests / policy.target_ongoing_requests)
        self._wanted.append((now, min(max(wanted, policy.min_replicas), policy.max_replicas)))
        while self._wanted[0][0] < now - max(policy.upscale_delay_s, policy.downscale_delay_s):
            self._wanted.popleft()
        up = self._since(now - policy.upscale_delay_s)
        down = self._since(now - policy.downscale_delay_s)
        more, fewer = min(up, default=current), max(down, default=current)
        return more if more > current else min(fewer, current)

    def _since(self, begin: float) -> list[int]:
        """What was wanted since then; nothing if that is before the first answer."""
        return [wanted for at, wanted in self._wanted if at >= begin] if begin >= self._started_at else []
