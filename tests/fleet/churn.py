"""Adds or removes a server every few seconds while a client calls, and counts what was lost or wrong.

``python -m tests.fleet.churn`` needs root, iproute2 and dnsmasq. Servers run on hosts of their own, which are network
namespaces. They are added to DNS as they start, so before they answer, and leave it as they are killed, told to stop,
or while they still serve.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.fleet.process import calling
from tests.fleet.servers import DOMAIN, PORT, Server
from tests.namespaces import Network

_WAYS = ("killed", "told to stop", "taken out of DNS first")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fleet.churn", description=__doc__)
    parser.add_argument("--calls", type=int, default=50_000)
    parser.add_argument("--every", type=float, default=3.0, help="seconds between two changes")
    parser.add_argument("--hosts", type=int, default=5, help="hosts for servers, of which at least two serve")
    parser.add_argument("--threads", type=int, default=8, help="of the client")
    options = parser.parse_args()
    names = [f"server{number}" for number in range(options.hosts)]
    with tempfile.TemporaryDirectory() as folder, Network(Path(folder), "client", *names) as network:
        churn = Churn(network, names)
        try:
            _run(churn, network, options)
        finally:
            churn.stop()


class Churn:
    """The servers that run, and those that were told to stop.

    Attributes:
        changes: How many were added or removed.
    """

    def __init__(self, network: Network, names: list[str]) -> None:
        self.changes = 0
        self._network = network
        self._free = list(names)
        self._running: dict[str, Server] = {}
        self._leaving: list[tuple[str, Server]] = []
        self._ways = itertools.cycle(_WAYS)
        self._random = random.Random(0)

    def start(self, count: int) -> None:
        """Starts the first servers, and waits until they are ready."""
        for _ in range(count):
            self._add()
        for server in self._running.values():
            server.wait_until_ready()

    def change(self) -> str:
        """Adds or removes a server, and returns what was done."""
        self.changes += 1
        for name, server in self._leaving:
            server.stop()
            self._free.append(name)
        self._leaving.clear()
        if self._free and (len(self._running) <= 2 or self._random.random() < 0.5):
            return f"{self._add()} added"
        way, name = next(self._ways), self._random.choice(sorted(self._running))
        server = self._running.pop(name)
        if way == "killed":
            server.kill()
        elif way == "told to stop":
            server.drain()
        self._publish()
        self._leaving.append((name, server))
        return f"{name} {way}"

    def stop(self) -> None:
        """Ends all servers."""
        for server in [*self._running.values(), *(server for _, server in self._leaving)]:
            server.stop()

    def _add(self) -> str:
        name = self._free.pop(0)
        self._running[name] = Server(self._network.hosts[name])
        self._publish()
        return name

    def _publish(self) -> None:
        self._network.name({DOMAIN: list(self._running)})


def _run(churn: Churn, network: Network, options: argparse.Namespace) -> None:
    churn.start(3)
    began, slowest_s = time.monotonic(), 0.0
    with calling(network, f"{DOMAIN}:{PORT}", threads=options.threads) as client:
        report = client.report()
        while report["answers"] < options.calls and not report["errors"]:
            time.sleep(options.every)
            change = churn.change()
            report = client.report()
            slowest_s = max(slowest_s, report["slowest_s"])
            print(f"{time.monotonic() - began:5.0f} s, {report['answers']} answers: {change}", flush=True)
    print(
        f"{report['answers']} answers with the right bits, {len(report['errors'])} lost or wrong, "
        f"{churn.changes} changes in {time.monotonic() - began:.0f} s, slowest call {slowest_s:.2f} s"
    )
    if report["errors"]:
        sys.exit(report["errors"][0])


if __name__ == "__main__":
    main()
