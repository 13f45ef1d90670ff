"""``bngrad info``: prints what a server tells about itself."""

from __future__ import annotations

import dataclasses
import json

import click

import bngrad
from bngrad_cli.target import Target
from bngrad_cli.target_options import with_target
from bngrad_wire.addresses import format_host_port
from bngrad_wire.printable import counted


@click.command()
@with_target(default_timeout_s=10)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def info(target: Target, as_json: bool) -> None:
    """Prints a server's version, devices, limits and endpoints.

    TARGET is HOST:PORT or unix:PATH, by default localhost:50051.
    """
    health = "SERVING" if target.is_serving() else "NOT_SERVING"
    with target.client() as client:
        server = client.server_info()
    if as_json:
        print(json.dumps({"target": target.address, "health": health, **dataclasses.asdict(server)}, indent=2))
        return
    width = max(map(len, (name for name, _ in _lines(server))))
    print(f"bngrad {server.version} on {target.address}: {health}")
    for name, text in _lines(server):
        print(f"{name:<{width}}  {text}")


def _lines(server: bngrad.ServerInfo) -> list[tuple[str, str]]:
    devices = [
        (
            device.name,
            f"{device.state}, restarted {counted(device.restarts, 'time')}"
            + (device.description and f": {device.description}"),
        )
        for device in server.devices
    ]
    remark = [("GPUs", server.device_remark)] if server.device_remark else []
    compiling = [("being compiled", ", ".join(server.compiling))] if server.compiling else []
    return [
        *devices,
        *remark,
        *compiling,
        ("requests in flight", str(server.requests)),
        ("unread connections", str(server.unread_connections)),
        ("batches computed", _batches(server.batch_sizes) or "none"),
        ("largest message", f"{server.max_message_bytes / 2**20:.1f} MiB"),
        ("memory for tensors", f"{server.arena_bytes / 2**30:.2f} GiB"),
        ("SDK connects to", _stream_address(server)),
        ("shared memory", server.local_directory or "none"),
        ("ops", ", ".join(server.ops)),
    ]


def _stream_address(server: bngrad.ServerInfo) -> str:
    if server.stream_host:
        return format_host_port(server.stream_host, server.stream_port)
    if server.stream_port:
        return "the address that it is given"
    here = "a socket beside the shared memory; elsewhere " if server.local_directory else ""
    return f"{here}the address that it is given, by grpcio"


def _batches(sizes: tuple[int, ...]) -> str:
    """Formats the number of batches by their number of requests, in ranges that double."""
    ranges = ["1 request" if k == 0 else f"{2**k} to {2 ** (k + 1) - 1} requests" for k in range(len(sizes))]
    return ", ".join(f"{count} of {requests}" for requests, count in zip(ranges, sizes, strict=True) if count)
