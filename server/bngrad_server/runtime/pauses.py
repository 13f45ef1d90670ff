"""Times in which this process did nothing, as it was stopped, or got no processor: no client is to blame for them."""

from __future__ import annotations

import time

_LEAST_S = 1.0


class Pauses:
    """Notices them for what looks at the clock several times a second."""

    def __init__(self) -> None:
        self._looked_at = time.monotonic()

    def since_last_look(self) -> float:
        """Returns the seconds since the last look if it should have looked long ago; otherwise 0."""
        now = time.monotonic()
        since_s, self._looked_at = now - self._looked_at, now
        return since_s if since_s >= _LEAST_S else 0.0
