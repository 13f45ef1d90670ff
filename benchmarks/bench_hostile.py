"""Measures what hostile clients cost a well-behaved one: its p99 under each attack against its p99 without.

The server has TLS and tokens. Every attack hits grpcio's port and the server's own at once, as fast as it can, with the
lowest CPU priority: a real attacker would have its own machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import grpc
import psutil
import trustme
from benchmarks.hostile.scans import SCANS
from benchmarks.kernels import report

from bngrad_cli.embedded import EmbeddedServer
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_protos.v1 import batch_norm_grad_pb2_grpc as pb_grpc
from bngrad_wire.token_format import new_token

TARGET = 3.0
_TRANSPORTS = {"grpcio": "unary", "own": "stream"}
_PACKAGES = ("grpcio", "hpack", "numpy")
_SETTLE_S = 0.5
_QUIET = "quiet"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_hostile", description=__doc__)
    parser.add_argument("--scans", nargs="+", choices=list(SCANS), default=list(SCANS))
    parser.add_argument("--seconds", type=float, default=5, help="of each turn of an attack")
    parser.add_argument("--turns", type=int, default=3, help="of each attack; all turns count together")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the numbers and the machine's facts")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, _server(Path(directory)) as (server, token, ca, ports):
        results = _measure(options, server, token, ca, ports)
    worst = max(each["ratio"] for result in results["scans"].values() for each in result["doors"].values())
    print(f"\nthe worst is {worst:.1f} x; the target is at most {TARGET:g} x")
    if options.json:
        machine = report.machine({name: metadata.version(name) for name in _PACKAGES}, os.cpu_count() or 0)
        facts = {"machine": machine, "seconds": options.seconds, "turns": options.turns}
        options.json.write_text(json.dumps(facts | results, indent=1) + "\n")


@contextlib.contextmanager
def _server(directory: Path) -> Iterator[tuple[EmbeddedServer, str, Path, list[int]]]:
    authority = trustme.CA()
    own = authority.issue_cert("localhost", "127.0.0.1")
    ca, certificate, key, tokens = (directory / name for name in ("ca.pem", "server.pem", "server.key", "tokens"))
    authority.cert_pem.write_to_path(ca)
    own.cert_chain_pems[0].write_to_path(certificate)
    own.private_key_pem.write_to_path(key)
    token, line = new_token("well-behaved")
    tokens.write_text(line)
    files = ("--tls-certificate", str(certificate), "--tls-key", str(key), "--token-file", str(tokens))
    with EmbeddedServer(options=files) as server:
        credentials = grpc.ssl_channel_credentials(ca.read_bytes())
        with grpc.secure_channel(server.target, credentials) as channel:
            who = (("authorization", f"Bearer {token}"),)
            info = pb_grpc.BatchNormGradServiceStub(channel).ServerInfo(pb.ServerInfoRequest(), metadata=who)
        yield server, token, ca, [int(server.target.rpartition(":")[2]), info.endpoints.stream_port]


def _measure(
    options: argparse.Namespace, server: EmbeddedServer, token: str, ca: Path, ports: list[int]
) -> dict[str, Any]:
    """Runs the attacks in turns, with a quiet turn among them; all turns of one count together."""
    front = psutil.Process(server.process.pid)
    measured: dict[str, dict[str, Any]] = {}
    most: dict[str, tuple[int, int]] = {}
    with contextlib.ExitStack() as stack:
        clients = {
            door: stack.enter_context(_client(server.target, token, ca, how)) for door, how in _TRANSPORTS.items()
        }
        _measure_clients(clients, 1.0)
        for turn in range(options.turns):
            for name in (_QUIET, *options.scans):
                print(f"\rturn {turn + 1} of {options.turns}: {name:12}", end="", file=sys.stderr, flush=True)
                with contextlib.nullcontext() if name == _QUIET else _scan(name, token, ca, ports):
                    time.sleep(_SETTLE_S)
                    _add(measured.setdefault(name, {}), _measure_clients(clients, options.seconds))
                    usage = front.memory_info().rss, front.num_fds()
                    most[name] = max(usage, most.get(name, usage))
                time.sleep(_SETTLE_S)
    print("\r" + " " * 40 + "\r", end="", file=sys.stderr)
    return _results(measured, most)


def _add(so_far: dict[str, Any], doors: dict[str, Any]) -> None:
    for door, measured in doors.items():
        total = so_far.setdefault(door, {"latencies": [], "errors": []})
        for kind, values in measured.items():
            total[kind] += values


def _results(measured: dict[str, dict[str, Any]], most: dict[str, tuple[int, int]]) -> dict[str, Any]:
    """Prints the figures and returns them."""
    figures = {name: {door: _figures(each) for door, each in doors.items()} for name, doors in measured.items()}
    quiet = figures.pop(_QUIET)
    print(f"{'':12}" + "".join(f"{door:>8} p50      p99  ratio errors" for door in quiet) + "   memory   descriptors")
    print(f"{_QUIET:12}" + "".join(_row(each) for each in quiet.values()))
    scans = {}
    for name, doors in figures.items():
        for door, each in doors.items():
            each["ratio"] = each["p99_s"] / quiet[door]["p99_s"]
        memory, descriptors = most[name]
        scans[name] = {"doors": doors, "memory_bytes": memory, "descriptors": descriptors}
        print(f"{name:12}{''.join(_row(each) for each in doors.values())} {memory / 1e6:6.0f} MB {descriptors:8}")
        for each in doors.values():
            if each["first_error"]:
                print(f"{'':12}{each['first_error']}")
    return {"quiet": quiet, "scans": scans}


@contextlib.contextmanager
def _client(target: str, token: str, ca: Path, transport: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "benchmarks.hostile.wellbehaved", target, token, str(ca), transport]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def _scan(name: str, token: str, ca: Path, ports: list[int]) -> Iterator[None]:
    command = [sys.executable, "-m", "benchmarks.hostile.scans", name, "127.0.0.1", token, str(ca), *map(str, ports)]
    with subprocess.Popen(command) as process:
        try:
            time.sleep(_SETTLE_S)
            yield
            if process.poll() is not None:
                sys.exit(f"the attack {name} ended with {process.returncode}")
        finally:
            process.kill()


def _measure_clients(clients: dict[str, subprocess.Popen[str]], seconds: float) -> dict[str, dict[str, Any]]:
    """Makes all clients call for this long at once, and returns their measurements."""
    for client in clients.values():
        assert client.stdin is not None
        client.stdin.write(f"{seconds}\n")
        client.stdin.flush()
    measured = {}
    for door, client in clients.items():
        assert client.stdout is not None
        measured[door] = json.loads(client.stdout.readline())
    return measured


def _figures(measured: dict[str, Any]) -> dict[str, Any]:
    cuts = statistics.quantiles(measured["latencies"], n=100)
    return {
        "calls": len(measured["latencies"]), "p50_s": cuts[49], "p99_s": cuts[98],
        "errors": len(measured["errors"]), "first_error": next(iter(measured["errors"]), None),
    }  # fmt: skip


def _row(figures: dict[str, Any]) -> str:
    ratio = f"{figures['ratio']:5.1f}" if "ratio" in figures else "     "
    return f"{1e3 * figures['p50_s']:9.2f} ms {1e3 * figures['p99_s']:6.2f} ms {ratio} {figures['errors']:6}"


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    main()
