"""Three servers, a DNS server, Envoy and a client, each on a host of its own: servers come, drain and are killed.

The hosts are network namespaces, see `tests.namespaces`. Needs root and Debian's dnsmasq: ``make fleet-test``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from tests.integration.problems import Case, random_inputs
from tests.namespaces import Host, Network
from tests.security.authority import Authority
from tests.servers import wait_until

import bngrad
from bngrad_wire.token_format import new_token

ROOT = Path(__file__).parents[2]
TARGET = "envoy:50051"
SERVERS = ("one", "two", "three")
CASES = [Case("v2", "NHWC", shape) for shape in [(2, 9, 9, 7), (16, 65, 65, 9)]]
CALLERS = 4
BNGRAD = (sys.executable, "-m", "bngrad_cli")
STATISTICS = (
    "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9901/clusters?format=json').read().decode())"
)
JOIN_TIMEOUT_S = 15.0
CALLS_PER_PHASE = 200


def call_until_told(directory: Path) -> None:
    """What the client's host runs: calls from several threads until stdin ends; prints how they ended."""
    ended, tls = threading.Event(), bngrad.Tls(directory / "ca.pem")

    def call(caller: int) -> tuple[int, int, list[str]]:
        case, answered, wrong, lost = CASES[caller % 2], 0, 0, []
        inputs = random_inputs(case.spec())
        transport: Any = ("unary", "stream", "auto", "auto")[caller]
        with bngrad.Client(TARGET, tls=tls, token=directory / "token", transport=transport) as client:
            expected = [each.tobytes() for each in case.run(client, inputs)[:3]]
            while not ended.is_set():
                try:
                    wrong += expected != [each.tobytes() for each in case.run(client, inputs, timeout=30)[:3]]
                    answered += 1
                except bngrad.BngradError as error:
                    lost.append(str(error))
        return answered, wrong, lost

    with ThreadPoolExecutor(CALLERS) as threads:
        callers = [threads.submit(call, caller) for caller in range(CALLERS)]
        sys.stdin.read()
        ended.set()
        outcomes = [each.result() for each in callers]
    answered, wrong, lost = zip(*outcomes, strict=True)
    print(json.dumps({"answered": sum(answered), "wrong": sum(wrong), "lost": [*chain.from_iterable(lost)]}))


class Fleet:
    """The hosts and what runs on them, with files in a directory."""

    def __init__(self, network: Network, directory: Path, stack: ExitStack) -> None:
        self._network = network
        self._directory = directory
        self._stack = stack
        self.servers: dict[str, subprocess.Popen[str]] = {}

    def start(self, name: str) -> None:
        """Starts a server; returns once it is ready."""
        options = ("--listen", "0.0.0.0:50051", "--device", "cpu", "--workers", "1", "--threads", "1", "--open-health")
        proxied = ("--advertise-stream", "none", "--shared-bytes", "0")
        secrets = ("--tls-certificate", "server.pem", "--tls-key", "server.key", "--token-file", "tokens")
        command = (*BNGRAD, "serve", *options, *proxied, *secrets)
        log = self._stack.enter_context((self._directory / f"{name}.log").open("wb"))
        process = self._network.hosts[name].popen(*command, cwd=self._directory, stdout=subprocess.PIPE, stderr=log)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        self.servers[name] = process
        assert process.stdout is not None
        assert " ready on " in process.stdout.readline()

    def start_envoy(self) -> None:
        """Starts Envoy with the shipped configuration, but for the paths of its files."""
        text = (ROOT / "docker" / "envoy" / "envoy.yaml").read_text().replace("/etc/envoy/", "")
        (self._directory / "envoy.yaml").write_text(text)
        command = (Path(sys.executable).parent / "envoy", "--config-path", "envoy.yaml", "--concurrency", "1")
        log = self._stack.enter_context((self._directory / "envoy.log").open("wb"))
        envoy = self._network.hosts["envoy"].popen(*command, cwd=self._directory, stdout=log, stderr=log)
        self._stack.callback(envoy.wait)
        self._stack.callback(envoy.kill)

    def answers(self) -> dict[str, int]:
        """Returns how many calls each healthy server has answered through Envoy."""
        try:
            page = self._network.hosts["envoy"].run(sys.executable, "-c", STATISTICS)
        except OSError:  # not listening yet
            return {}
        (cluster,) = json.loads(page)["cluster_statuses"]
        names = {host.address: name for name, host in self._network.hosts.items()}
        return {
            names[each["address"]["socket_address"]["address"]]: _successes(each)
            for each in cluster.get("host_statuses", ())
            if each["health_status"] == {"eds_health_status": "HEALTHY"}
        }


def _successes(host: dict[str, Any]) -> int:
    return sum(int(stat.get("value", 0)) for stat in host["stats"] if stat["name"] == "rq_success")


@contextmanager
def running(directory: Path) -> Iterator[tuple[Network, Fleet, Host]]:
    """Gives the network, the fleet with its first two servers, and the client's host."""
    authority = Authority(directory, "ca")
    for name, pair in (("server", authority.issue("bngrad")), ("envoy", authority.issue("envoy"))):
        pair.certificate.rename(directory / f"{name}.pem")
        pair.key.rename(directory / f"{name}.key")
    token, line = new_token("trainer")
    (directory / "token").write_text(token)
    (directory / "tokens").write_text(f"{line}\n")
    for name in ("server.key", "tokens"):
        (directory / name).chmod(0o600)
    with Network(directory, "envoy", "client", *SERVERS) as network, ExitStack() as stack:
        network.name({"envoy": ["envoy"], "bngrad": ["one", "two"]})
        fleet = Fleet(network, directory, stack)
        for name in ("one", "two"):
            fleet.start(name)
        fleet.start_envoy()
        wait_until(lambda: fleet.answers().keys() == {"one", "two"}, poll_s=0.2)
        yield network, fleet, network.hosts["client"]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, running(Path(folder)) as (network, fleet, host):
        checked = host.popen(*(*BNGRAD, "check", TARGET, "--tls-ca", "ca.pem", "--token-file", "token"), cwd=folder)
        assert checked.wait() == 0
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        client = host.popen(sys.executable, "-m", "tests.deploy.fleet", folder, cwd=ROOT, **pipes)

        def wait_for_calls() -> None:
            before = sum(fleet.answers().values())
            wait_until(lambda: sum(fleet.answers().values()) >= before + CALLS_PER_PHASE, poll_s=0.2)

        wait_for_calls()
        fleet.start("three")
        network.name({"envoy": ["envoy"], "bngrad": list(SERVERS)})
        began = time.monotonic()
        wait_until(lambda: fleet.answers().get("three", 0) > 10, JOIN_TIMEOUT_S, poll_s=0.2)
        print(f"a server that DNS names has calls after {time.monotonic() - began:.1f} s", flush=True)
        fleet.servers["one"].kill()
        wait_until(lambda: "one" not in fleet.answers(), poll_s=0.2)
        wait_for_calls()
        print("one server was killed", flush=True)
        fleet.servers["two"].terminate()
        assert fleet.servers["two"].wait() == 0
        network.name({"envoy": ["envoy"], "bngrad": ["three"]})
        wait_for_calls()
        print("one server has drained", flush=True)
        output, _ = client.communicate("")
    outcome = json.loads(output)
    print(f"answered {outcome['answered']}, with other bits {outcome['wrong']}, lost {len(outcome['lost'])}")
    if outcome["wrong"] or outcome["lost"]:
        raise SystemExit("\n".join(outcome["lost"][:5]) or "a call had other bits")


if __name__ == "__main__":
    call_until_told(Path(sys.argv[1])) if sys.argv[1:] else main()
