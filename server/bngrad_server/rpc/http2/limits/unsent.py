"""How long the clients of connections with several calls may take nothing of what there is for them."""

from __future__ import annotations

import time
from collections.abc import Iterator

from bngrad_server.rpc.http2.connection import Connection

_TIMEOUT_S = 30.0


class Unsent:
    """The connections that have something unsent; for the event loop's thread."""

    def __init__(self) -> None:
        self._all: dict[Connection, tuple[int, float]] = {}  # how much has moved, and since when it is as much

    def note(self, connection: Connection) -> None:
        """Notes whether a connection has something unsent."""
        if not connection.http.has_unsent:
            self._all.pop(connection, None)
        elif connection not in self._all:
            self._all[connection] = connection.http.io.moved, time.monotonic()

    def excuse(self, pause_s: float) -> None:
        """See `bngrad_server.rpc.http2.reading.Readers.excuse`."""
        for connection, (moved, since) in self._all.items():
            self._all[connection] = moved, since + pause_s

    def overdue(self) -> Iterator[Connection]:
        """Yields those whose clients have taken nothing for too long."""
        now = time.monotonic()
        for connection, (moved, since) in list(self._all.items()):
            if connection.http.io.moved != moved:
                self._all[connection] = connection.http.io.moved, now
            elif now - since > _TIMEOUT_S:
                yield connection

    def discard(self, connection: Connection) -> None:
        """Forgets a connection, which is closed."""
        self._all.pop(connection, None)
