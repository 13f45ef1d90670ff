"""Who waits for an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, eq=False, slots=True)
class Caller:
    """Whoever made a call, and how long it waits.

    Attributes:
        client: Whom it belongs to: clients share the server evenly. The host of a TCP connection, the process behind a
            Unix socket.
        deadline: When it gives up, on the monotonic clock; None means never.
        is_gone: Tells whether it has given up already.
        hang_up: Ends its call, from any thread.
        metadata: What came with the call.
    """

    client: str
    deadline: float | None
    is_gone: Callable[[], bool]
    hang_up: Callable[[], None]
    metadata: Mapping[str, str]
