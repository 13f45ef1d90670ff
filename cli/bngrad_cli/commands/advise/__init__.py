"""``bngrad advise``: says where the gradients of a model's batch normalisations are computed fastest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bngrad_cli.commands.advise import contestants, shapes, verdict
from bngrad_cli.commands.advise.contestants import LOCAL, PYTORCH, SERVER
from bngrad_cli.commands.advise.verdict import Advice, Times
from bngrad_cli.sample_requests import DTYPES
from bngrad_cli.target import Target
from bngrad_cli.target_options import Seconds, with_target
from bngrad_cli.terminal import descriptions, exit_on_sigterm, plain_table, print_lines, wide_console

_COLUMNS = (SERVER, LOCAL, PYTORCH)


@click.command()
@with_target(default_timeout_s=60)
@click.option(
    "--model",
    default="resnet50",
    show_default=True,
    metavar="resnet50|SHAPES",
    help="The layers: ResNet-50's, or shapes of their inputs in the order of --data-format, such as "
    "32x64x56x56*6,32x128x28x28 for seven layers, six of them of one shape.",
)
@click.option(
    "--batch", type=click.IntRange(min=1), metavar="INTEGER", help="Images in a batch of ResNet-50. Default: 32."
)
@click.option(
    "--dtype",
    type=click.Choice(list(DTYPES)),
    default="float32",
    show_default=True,
    help="Element type of the tensors.",
)
@click.option(
    "--data-format",
    type=click.Choice(["NCHW", "NHWC"]),
    default="NCHW",
    show_default=True,
    help="NCHW is PyTorch's own format, NHWC its channels_last.",
)
@click.option(
    "--seconds",
    type=Seconds(),
    default=1,
    show_default=True,
    metavar="SECONDS",
    help="How long to measure each shape.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def advise(
    target: Target,
    model: str,
    batch: int | None,
    dtype: str,
    data_format: shapes.DataFormat,
    seconds: float,
    as_json: bool,
) -> None:
    """Says where the gradients of a model's batch norms are fast.

    TARGET is HOST:PORT or unix:PATH, by default localhost:50051. Backward passes by the server, by the CPU kernels in
    this process (local:) and by PyTorch on this CPU take turns, as far as these are installed. Nothing is measured on a
    GPU of this machine: a training that runs there should compute its gradients there.
    """
    if model == "resnet50":
        layers = shapes.resnet50(batch or 32, data_format)
    elif batch is not None:
        raise click.UsageError("--batch is for resnet50: the first number of a shape is its batch")
    else:
        layers = shapes.parse(model)
    exit_on_sigterm()
    target.check_serving()
    with target.client() as client, ExitStack() as stack:
        console = Console(stderr=True)
        server = client.server_info()
        found, missing = contestants.find(client, stack, DTYPES[dtype], console)
        shown = track(layers, "measuring", console=console, transient=True, disable=not console.is_terminal)
        milliseconds = [contestants.milliseconds(found, layer, DTYPES[dtype], data_format, seconds) for layer in shown]
    times = Times(layers, milliseconds, DTYPES[dtype].itemsize)
    advice = verdict.advise(times, target.address)
    if as_json:
        about = {"target": target.address, "version": server.version, "dtype": dtype, "data_format": data_format}
        print(json.dumps(about | _as_json(times, missing, advice), indent=2))
        return
    console = wide_console()
    print_lines(console, [f"{SERVER}: bngrad {server.version} on {target.address}: {descriptions(server)}"])
    units = "MB: tensors of a call; milliseconds of a backward pass, medians"
    console.print(f"{dtype} {data_format}; {units}", highlight=False)
    console.print(_table(times))
    _print_rest(console, times, missing, advice)


def _as_json(times: Times, missing: Mapping[str, str], advice: Advice) -> dict[str, Any]:
    timed = zip(times.layers, times.milliseconds, strict=True)
    return {
        "layers": [
            {
                "shape": layer.shape,
                "count": layer.count,
                "bytes": times.nbytes(layer),
                "milliseconds": found,
                "fastest": min(found, key=found.__getitem__),
            }
            for layer, found in timed
        ],
        "total_milliseconds": {name: times.total(name) for name in times.milliseconds[0]},
        "break_even_gigabits_per_second": times.break_even_gigabits(),
        "not_measured": missing,
        "verdict": advice.verdict,
        "code": advice.code,
    }


def _table(times: Times) -> Table:
    table = plain_table()
    table.add_column("layer", no_wrap=True)
    for name in ("count", "MB", *_COLUMNS):
        table.add_column(name, no_wrap=True, justify="right")
    table.add_column("fastest", no_wrap=True)
    for layer, found in zip(times.layers, times.milliseconds, strict=True):
        numbers = [f"{found[name]:.2f}" if name in found else "-" for name in _COLUMNS]
        fastest = min(found, key=found.__getitem__) if len(found) > 1 else "-"
        table.add_row(str(layer), str(layer.count), f"{times.nbytes(layer) / 1e6:.1f}", *numbers, fastest)
    measured = times.milliseconds[0]
    totals = [_total(times.total(name)) if name in measured else "-" for name in _COLUMNS]
    table.add_row("all", str(times.count), "", *totals, "")
    return table


def _total(milliseconds: float) -> str:
    return f"{milliseconds:.0f}" if milliseconds >= 100 else f"{milliseconds:.2f}"


def _print_rest(console: Console, times: Times, missing: Mapping[str, str], advice: Advice) -> None:
    lines = [f"{name} was not measured: {reason}" for name, reason in missing.items()]
    gigabits = times.break_even_gigabits()
    if gigabits is not None:
        bandwidth = f"{gigabits:.0f}" if gigabits >= 10 else f"{gigabits:.2g}"
        lines.append(f"A network needs {bandwidth} Gbit/s to move the tensors in the time of computing here.")
    lines.append(f"Verdict: {advice.verdict}")
    if advice.code:
        lines.append(f"  {advice.code}")
    print_lines(console, lines)
