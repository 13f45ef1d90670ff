"""A server on a host of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.namespaces import Host, Network

DOMAIN = "fleet.test"
PORT, OTHER_PORT = 50051, 50052


class Server:
    """``bngrad serve`` on a host, without shared memory: the hosts have one file system, and only seem to be apart.

    Each batch is one call, so that its count of batches is that of calls.
    """

    def __init__(self, host: Host, advertised: str = "") -> None:
        """Begins to start it; clients are told that its port is elsewhere, if it is."""
        self.host = host
        self.address = host.address
        self._process = host.popen(
            sys.executable, "-m", "bngrad_cli", "serve", "--listen", f"{host.address}:{PORT}",
            "--advertise-stream", advertised or f"{host.address}:{PORT}",
            "--device", "cpu", "--workers", "1", "--threads", "1", "--shared-bytes", "0", "--max-batch-jobs", "1",
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def wait_until_ready(self) -> None:
        assert self._process.stdout is not None
        assert " ready on " in self._process.stdout.readline()

    def drop(self, port: int) -> None:
        """Drops packets to a TCP port of its host, as a firewall does."""
        self.host.run("nft", "add table ip guard")
        self.host.run("nft", "add chain ip guard input { type filter hook input priority 0; }")
        self.host.run("nft", f"add rule ip guard input tcp dport {port} drop")

    def vanish(self) -> None:
        """Drops every packet to and from its host, as if that had lost its power."""
        self.host.run("nft", "add table ip gone")
        for direction in ("input", "output"):
            chain = f"{{ type filter hook {direction} priority 0; policy drop; }}"
            self.host.run("nft", f"add chain ip gone {direction} {chain}")

    def come_back(self) -> None:
        """Ends what `vanish` began."""
        self.host.run("nft", "delete table ip gone")

    def freeze(self) -> None:
        """Has it receive calls, and answer none."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Ends what `freeze` began."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Ends it at once."""
        self._process.send_signal(signal.SIGKILL)

    def drain(self) -> None:
        """Tells it to stop."""
        self._process.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        self.drain()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextmanager
def serving(network: Network, *names: str, advertised: str = "") -> Iterator[list[Server]]:
    servers = [Server(network.hosts[name], advertised) for name in names]
    try:
        for server in servers:
            server.wait_until_ready()
        yield servers
    finally:
        for server in servers:
            server.stop()
