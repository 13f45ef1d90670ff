"""The client's process on a host, and what it reports."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.fleet.servers import Server
from tests.namespaces import Network
from tests.servers import Transport, wait_until


class FleetClient:
    """The process of `tests.fleet.client`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def report(self, *servers: Server) -> Any:
        """Returns what the client has to say, about these servers too."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(*(server.address for server in servers), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def wait_for_calls_that_hang(self) -> None:
        """Waits until calls hang, and then until all of these have ended."""
        try:
            wait_until(lambda: self.report()["oldest_s"] > 1.0)
            wait_until(lambda: self.report()["oldest_s"] < 1.0)
        except AssertionError:
            raise AssertionError(f"no call hangs, or one does for ever: {self.report()}") from None

    def shares(self, *servers: Server, answers: int = 300) -> list[float]:
        """Returns what part of the next calls each of these servers computes."""
        before = self.report(*servers)
        wait_until(lambda: self.report()["answers"] >= before["answers"] + answers or self.report()["errors"])
        after = self.report(*servers)
        assert not after["errors"]
        counts = [after["batches"][each.address] - before["batches"][each.address] for each in servers]
        return [count / max(sum(counts), 1) for count in counts]


@contextmanager
def calling(network: Network, *targets: str, threads: int = 12, transport: Transport = "auto") -> Iterator[FleetClient]:
    command = [sys.executable, "-m", "tests.fleet.client", ",".join(targets), str(threads), transport]
    host = network.hosts["client"]
    with host.popen(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield FleetClient(process)
        assert process.stdin is not None
        process.stdin.close()
