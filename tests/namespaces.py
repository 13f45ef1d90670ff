"""Several hosts on one machine: network namespaces on a bridge, with a DNS server. Needs root and dnsmasq."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.servers import wait_until

_TTL_S = 1


def run(*command: object) -> str:
    """Runs a command, and returns its output; its complaint is in the error."""
    finished = subprocess.run([*map(str, command)], capture_output=True, text=True)
    if finished.returncode:
        raise OSError(f"{' '.join(map(str, command))}: {finished.stderr}")
    return finished.stdout


class Host:
    """A namespace with an address; what runs in it sees no other network.

    Attributes:
        address: Its IPv4 address.
    """

    def __init__(self, namespace: str, address: str) -> None:
        self.address = address
        self._namespace = namespace

    def popen(self, *command: object, **options: Any) -> subprocess.Popen[str]:
        """Starts a command on this host."""
        words = ["ip", "netns", "exec", self._namespace, *map(str, command)]
        return subprocess.Popen(words, text=True, **options)

    def run(self, *command: object) -> str:
        """Runs a command on this host, and returns its output."""
        return run("ip", "netns", "exec", self._namespace, *command)


class Network:
    """Hosts that reach each other, while a ``with`` block lasts.

    Attributes:
        hosts: The hosts by their names.
    """

    def __init__(self, directory: Path, *names: str) -> None:
        """Makes nothing yet; ``directory`` keeps the DNS server's names."""
        self.hosts: dict[str, Host] = {}
        self._names = names
        self._directory = directory / "names"
        self._prefix = f"bngrad{os.getpid()}"
        self._stack = ExitStack()
        self._dnsmasq: subprocess.Popen[str]

    def __enter__(self) -> Network:
        try:
            self._make()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def name(self, names: Mapping[str, list[str]]) -> None:
        """Has the DNS server know these names of hosts, and no others; asked again after a second."""
        lines = [f"{self.hosts[host].address} {name}\n" for name, hosts in names.items() for host in hosts]
        draft = self._directory.with_suffix(".new")
        draft.write_text("".join(lines))
        draft.replace(self._directory)
        self._dnsmasq.send_signal(signal.SIGHUP)  # it reads the file again

    def _make(self) -> None:
        bridge = self._namespace("switch")
        run("ip", "-n", bridge, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", bridge, "link", "set", "bridge", "up")
        for number, name in enumerate(("dns", *self._names), 1):
            address = f"10.77.0.{number}"
            namespace = self._namespace(name)
            cable, end = f"port{number}", "eth0"
            run("ip", "-n", bridge, "link", "add", cable, "type", "veth", "peer", "name", end, "netns", namespace)
            run("ip", "-n", bridge, "link", "set", cable, "master", "bridge", "up")
            run("ip", "-n", namespace, "address", "add", f"{address}/24", "dev", end)
            for link in ("lo", end):
                run("ip", "-n", namespace, "link", "set", link, "up")
            self.hosts[name] = Host(namespace, address)
        self._directory.touch()
        options = ("--keep-in-foreground", "--conf-file=/dev/null", "--no-resolv", "--no-hosts", "--user=root")
        cache = (f"--addn-hosts={self._directory}", f"--local-ttl={_TTL_S}", "--pid-file=", "--bind-interfaces")
        self._dnsmasq = self.hosts["dns"].popen("dnsmasq", *options, *cache, stderr=subprocess.DEVNULL)
        self._stack.callback(self._dnsmasq.wait)
        self._stack.callback(self._dnsmasq.kill)
        wait_until(lambda: self.hosts["dns"].run("ss", "-Hlun", "sport", "=", "53"))

    def _namespace(self, name: str) -> str:
        namespace = f"{self._prefix}-{name}"
        run("ip", "netns", "add", namespace)
        self._stack.callback(run, "ip", "netns", "delete", namespace)
        folder = Path("/etc/netns") / namespace  # what it has there replaces the file of /etc
        folder.mkdir(parents=True)
        self._stack.callback(shutil.rmtree, folder)
        (folder / "resolv.conf").write_text("nameserver 10.77.0.1\noptions timeout:1 attempts:2\n")
        return namespace
