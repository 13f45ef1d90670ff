"""``bngrad bench``: measures how fast a server answers, by shape and transport."""

from __future__ import annotations

import contextlib
import functools
import json
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.progress import Progress

import bngrad
from bngrad_cli.load_generator import Measurement, measure
from bngrad_cli.sample_requests import DTYPES, SampleRequest, random_request
from bngrad_cli.target import Target, TargetError, wait_until_compiled
from bngrad_cli.target_options import Seconds, with_target
from bngrad_cli.terminal import descriptions, exit_on_sigterm, plain_table, print_lines, wide_console

_TRANSPORTS = ("auto", "shared", "stream", "unary")
_LAYERS = {
    "tiny": (4, 4, 4, 16),
    "conv5-1x1": (32, 7, 7, 2048),
    "conv4-3x3": (32, 14, 14, 256),
    "conv3-3x3": (32, 28, 28, 128),
    "conv2-3x3": (32, 56, 56, 64),
    "conv2-1x1": (32, 56, 56, 256),
}
_PERCENTILES = (50, 90, 99)
_TICKS_PER_S = 10
_CAPTION = """\
Layers of ResNet-50 at batch 32, and a tiny one. ms: 50, 90 and 99 % of the
calls took at most this long. GB/s: tensors sent and received. auto chooses the
fastest transport; with shared, the arrays of the caller lie in shared memory."""


@click.command()
@with_target(default_timeout_s=60)
@click.option(
    "--seconds",
    type=Seconds(),
    default=1,
    show_default=True,
    metavar="SECONDS",
    help="How long to measure each line of the table.",
)
@click.option(
    "--concurrency",
    type=click.IntRange(1, 256),
    default=1,
    show_default=True,
    metavar="INTEGER",
    help="Threads that call at the same time.",
)
@click.option(
    "--layer",
    "layers",
    type=click.Choice(list(_LAYERS)),
    multiple=True,
    default=tuple(_LAYERS),
    help="Shape of the tensors; may be given several times. Default: all.",
)
@click.option(
    "--transport",
    "transports",
    type=click.Choice(_TRANSPORTS),
    multiple=True,
    default=_TRANSPORTS,
    help="Transport of the tensors; may be given several times. Default: all.",
)
@click.option(
    "--dtype",
    type=click.Choice(list(DTYPES)),
    default="float32",
    show_default=True,
    help="Element type of the tensors.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def bench(
    target: Target,
    seconds: float,
    concurrency: int,
    layers: tuple[str, ...],
    transports: tuple[str, ...],
    dtype: str,
    as_json: bool,
) -> None:
    """Measures how fast a server answers.

    TARGET is HOST:PORT or unix:PATH, by default localhost:50051. The whole table takes about half a minute.
    Ctrl-C ends the measurement early, and prints the table of what was measured until then.
    """
    exit_on_sigterm()
    target.check_serving()
    with target.client() as client:
        wait_until_compiled(client, Console(stderr=True))
        server = client.server_info()
    stopping = threading.Event()
    done = _measure_all(target, layers, transports, DTYPES[dtype], seconds, concurrency, stopping)
    if as_json:
        print(json.dumps(_as_json(target, server, dtype, concurrency, done), indent=2))
    else:
        _print_table(target, server, dtype, concurrency, done)
    if stopping.is_set():
        raise KeyboardInterrupt
    if done[-1].has_failed:
        raise TargetError(str(done[-1].error))


def _measure_all(
    target: Target,
    layers: Iterable[str],
    transports: Iterable[str],
    dtype: np.dtype[Any],
    seconds: float,
    concurrency: int,
    stopping: threading.Event,
) -> list[Measurement]:
    """Measures every layer over every transport; ends early if a call fails, or by Ctrl-C, which sets ``stopping``."""
    done: list[Measurement] = []
    with contextlib.ExitStack() as stack:
        clients = {name: stack.enter_context(target.client(transport=name)) for name in dict.fromkeys(transports)}
        console = Console(stderr=True)
        progress = stack.enter_context(Progress(console=console, transient=True, disable=not console.is_terminal))
        task = progress.add_task("", total=len(set(layers)) * len(clients))
        try:
            for request, transport in _cases(layers, dtype, clients):
                progress.update(task, completed=len(done), description=f"{request.data} {transport}")
                done.append(Measurement(request.data, request.spec.shape, transport, request.nbytes))
                tick = functools.partial(progress.advance, task, 1 / _TICKS_PER_S / seconds)
                measure(clients[transport], request, done[-1], seconds, concurrency, stopping, tick)
                if stopping.is_set() or done[-1].has_failed:
                    break
        except KeyboardInterrupt:  # between two measurements
            stopping.set()
    return done


def _cases(
    layers: Iterable[str], dtype: np.dtype[Any], transports: Iterable[str]
) -> Iterator[tuple[SampleRequest, str]]:
    for layer in dict.fromkeys(layers):
        request = random_request("V3", "NHWC", dtype, _LAYERS[layer], layer)
        yield from ((request, transport) for transport in transports)


def _as_json(
    target: Target, server: bngrad.ServerInfo, dtype: str, concurrency: int, done: list[Measurement]
) -> dict[str, Any]:
    return {
        "target": target.address,
        "version": server.version,
        "devices": [device.description for device in server.devices],
        "dtype": dtype,
        "concurrency": concurrency,
        "measurements": [
            {
                "layer": each.layer,
                "shape": each.shape,
                "transport": each.transport,
                "bytes": each.nbytes,
                "requests": len(each.latencies_s),
                **_numbers(each),
                "error": str(each.error) if each.error else None,
            }
            for each in done
        ],
    }


def _numbers(measurement: Measurement) -> dict[str, float]:
    """Returns percentiles and rates; nothing if no call was answered."""
    if not measurement.latencies_s:
        return {}
    return {
        **{f"p{percent}_ms": measurement.percentile_ms(percent) for percent in _PERCENTILES},
        "requests_per_s": measurement.requests_per_s,
        "gigabytes_per_s": measurement.gigabytes_per_s,
    }


def _print_table(
    target: Target, server: bngrad.ServerInfo, dtype: str, concurrency: int, done: list[Measurement]
) -> None:
    table = plain_table()
    for name in ("layer", "shape", "transport"):
        table.add_column(name, no_wrap=True)
    for name in (*(f"p{percent} ms" for percent in _PERCENTILES), "calls/s", "GB/s"):
        table.add_column(name, no_wrap=True, justify="right")
    for before, each in zip([None, *done], done, strict=False):
        is_new = before is None or before.layer != each.layer
        where = (each.layer, "x".join(map(str, each.shape))) if is_new else ("", "")
        table.add_row(*where, each.transport, *(_short(number) for number in _numbers(each).values()))
    console = wide_console()
    devices = f"{len(server.devices)} x {descriptions(server)}"
    print_lines(console, [f"bngrad {server.version} on {target.address}: {devices}"])
    console.print(f"{dtype}, {concurrency} at once", highlight=False)
    console.print(table)
    refused = [each for each in done if each.error and not each.has_failed]
    print_lines(console, (f"{each.layer} {each.transport}: {each.error}" for each in refused))
    console.print(_CAPTION, highlight=False)


def _short(number: float) -> str:
    """Formats a number with three digits, fewer below 0.0001, and without an exponent."""
    if 0 < number < 1e-4:
        return f"{number:.6f}"
    return f"{number:.0f}" if number >= 100 else f"{number:#.3g}"
