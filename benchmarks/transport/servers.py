"""The other contestants' servers, each in its own process: ``python -m benchmarks.transport.servers KIND ADDRESS``.

A server prints ``ready on ADDRESS``, and ends when its stdin closes, so also when the benchmark is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

_MODULES = {
    "protobuf": "protobuf",
    "echo": "echo",
    "flight": "arrow_flight",
    "flight-tls": "arrow_flight",
    "sockets": "sockets",
    "triton": "triton.server",
}
_READY = "ready on "
_STOP_TIMEOUT_S = 10.0


class ServerStartError(Exception):
    """A server ended before it was ready."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transport.servers", description=__doc__)
    parser.add_argument("kind", choices=list(_MODULES))
    parser.add_argument("address", help="HOST:PORT, with port 0 for a free one, or unix:PATH")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of the kernel")
    parser.add_argument("--device", default="cpu", help="of the kernel")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The benchmark handles Ctrl-C, and then closes stdin.
    module = importlib.import_module(f"benchmarks.transport.{_MODULES[options.kind]}")
    tls = {"encrypted": True} if options.kind.endswith("-tls") else {}
    address, server = module.start(options.address, options.threads, options.device, **tls)
    assert server is not None
    print(_READY + address, flush=True)
    sys.stdin.read()
    os._exit(0)  # Without waiting for requests in flight.


@contextlib.contextmanager
def running(kind: str, address: str, threads: int, device: str) -> Iterator[str]:
    """Runs a server for the length of the block, and gives the address that clients take."""
    options = "--threads", str(threads), "--device", device
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.transport.servers", kind, address, *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        try:
            ready = process.stdout.readline().strip()
            if not ready.startswith(_READY):
                raise ServerStartError(f"the {kind} server did not start")
            yield ready.removeprefix(_READY)
        finally:
            process.stdin.close()
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()


if __name__ == "__main__":
    main()
