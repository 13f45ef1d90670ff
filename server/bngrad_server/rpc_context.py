"""What the server knows of a call beside its request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol


def no_check() -> None:
    """The check of a server without tokens."""


class Traffic(Protocol):
    """How a call, or its connection, makes progress; for any thread."""

    @property
    def moved(self) -> int:
        """How many bytes have been received and sent so far."""

    def interrupt(self) -> object:
        """Ends a wait for the client's next bytes, so that the call can be ended with a status."""

    def resume(self) -> object:
        """Allows to receive again, after `interrupt`."""


class NoTraffic:
    """The progress of what neither receives nor sends; see `Traffic`."""

    moved = 0

    def interrupt(self) -> None:
        """Does nothing."""

    def resume(self) -> None:
        """Does nothing."""


@dataclass(frozen=True, eq=False, slots=True)
class RpcContext:
    """The client, deadline and metadata of a call.

    Attributes:
        client: The client that the call belongs to; clients share the server evenly. The owner of the call's token,
            else the name in the client's certificate, else the host of a TCP connection, the process of a Unix
            socket.
        deadline: The call's deadline on the monotonic clock; None for none.
        is_cancelled: Returns whether the client has cancelled the call or is gone.
        abort: Ends the call from any thread, or its connection if that has no other calls.
        metadata: The call's metadata.
        check: Raises UnauthenticatedError if the call's token is no longer valid; for calls that go on for long.
        traffic: Its progress.
    """

    client: str
    deadline: float | None
    is_cancelled: Callable[[], bool]
    abort: Callable[[], object]
    metadata: Mapping[str, str]
    check: Callable[[], object] = no_check
    traffic: Traffic = NoTraffic()  # noqa: RUF009 - it has no state
