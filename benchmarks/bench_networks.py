"""What `bngrad advise` measures over networks of some bandwidths. Needs root, ``ip`` and ``tc``.

The client is in a network namespace, which a link joins to the server; the kernel limits the link. Server
and client share the machine's cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks.warm_server import WarmServer

from bngrad_cli.commands.advise.contestants import LOCAL, PYTORCH, SERVER
from bngrad_server.memory.leases import PARENT

_HERE, _THERE = "10.99.0.1", "10.99.0.2"
_BURST_S = 1e-3
"""What the token bucket lets pass at once: the bandwidth times this."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_networks", description=__doc__)
    parser.add_argument("--gigabits", type=float, nargs="*", default=[0, 1, 10, 25], help="Gbit/s; 0 for shared memory")
    parser.add_argument("--cores", default="", help="the client's cores as of taskset, such as 0; default all")
    parser.add_argument("--seconds", default="0.3", help="how long to measure each shape")
    parser.add_argument("--model", default="resnet50", help="as of bngrad advise")
    parser.add_argument("--data-format", choices=["NCHW", "NHWC"], default="NCHW")
    options = parser.parse_args()
    command = [sys.executable, "-m", "bngrad_cli", "advise", "--json", "--timeout", "100", "--seconds", options.seconds]
    command += ["--data-format", options.data_format, "--model", options.model]
    if options.cores:
        command = ["taskset", "--cpu-list", options.cores, *command]
    columns = (SERVER, LOCAL, PYTORCH)
    print(f"{'ms of all backward passes':28}" + "".join(f"{name:>10}" for name in columns) + f"{'break-even':>12}")
    for gigabits in options.gigabits:
        found = _over_network(gigabits, command) if gigabits else _over_shared_memory(command)
        total = found["total_milliseconds"]
        name = f"{gigabits:g} Gbit/s" if gigabits else "shared memory"
        even = found["break_even_gigabits_per_second"]
        print(f"{name:28}" + "".join(f"{total[each]:10.0f}" for each in columns) + f"{even:12.0f}", flush=True)


def _over_shared_memory(command: Sequence[str]) -> dict[str, Any]:
    with WarmServer() as server:
        return _said([*command, server.target])


def _over_network(gigabits: float, command: Sequence[str]) -> dict[str, Any]:
    with _link(gigabits) as namespace, WarmServer(f"{_HERE}:0") as server:
        # The server's Unix sockets are hidden from the client, as they would be from another host.
        script = f'mount -t tmpfs none {PARENT} && exec "$@"'
        return _said(["ip", "netns", "exec", namespace, "sh", "-c", script, "sh", *command, server.target])


def _said(command: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return found


@contextmanager
def _link(gigabits: float) -> Iterator[str]:
    """Makes a network namespace, and a link to it; returns its name."""
    name = f"bngrad-{os.getpid()}"
    inside = f"ip netns exec {name} "
    limit = f"root tbf rate {gigabits}gbit burst {gigabits * 1e9 / 8 * _BURST_S:.0f} latency 50ms"
    _run(f"ip netns add {name}")
    try:
        _run(f"ip link add {name} type veth peer name inner netns {name}")
        for prefix, device, address in (("", name, _HERE), (inside, "inner", _THERE)):
            _run(f"{prefix}ip address add {address}/30 dev {device}")
            _run(f"{prefix}ip link set {device} up")
            _run(f"{prefix}tc qdisc add dev {device} {limit}")
        yield name
    finally:
        _run(f"ip netns delete {name}")


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True)


if __name__ == "__main__":
    main()
