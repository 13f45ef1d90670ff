"""Who waits for an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


def _no_check() -> None:
    """For servers that let everybody in."""


@dataclass(frozen=True, eq=False, slots=True)
class RpcContext:
    """Whoever made a call, and how long it waits.

    Attributes:
        client: Whom it belongs to: clients share the server evenly. The owner of its token; else whom its certificate
            names; else the host of a TCP connection, the process behind a Unix socket.
        deadline: When it gives up, on the monotonic clock; None means never.
        is_gone: Tells whether it has given up already.
        hang_up: Ends its call, from any thread.
        metadata: What came with the call.
        check: Raises where it may call no longer; for calls that go on for long.
    """

    client: str
    deadline: float | None
    is_gone: Callable[[], bool]
    hang_up: Callable[[], None]
    metadata: Mapping[str, str]
    check: Callable[[], object] = _no_check
