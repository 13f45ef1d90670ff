"""``bngrad demo``: real gradients through a real server, and a look at every answer."""

from __future__ import annotations

import contextlib
import importlib.resources
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import click
import numpy as np
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

import bngrad
from bngrad_cli.embedded import EmbeddedServer, ServerStartError
from bngrad_cli.sample_requests import BFLOAT16, Request, random_request
from bngrad_kernels import tolerances

_RESNET50_LAYER = (32, 56, 56, 64)
_TIMED_SECONDS = 0.5
_CAPTION = """\
V3 and V2 are FusedBatchNormGradV3 and V2, oneDNN is BatchNormTrainingBackprop.
ms: the median round trip, client to client. GB/s: tensors sent and received.
error: the largest against float64, of x_backprop (relative to its largest
value) and of the two sums (relative to the sum of their terms' moduli);
whichever is nearer to its bound."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """What came of a request: how long it took, how far it was off."""

    seconds: float
    errors: tolerances.Errors
    bounds: tolerances.Errors

    @property
    def is_right(self) -> bool:
        return all(error <= bound for error, bound in zip(self.errors, self.bounds, strict=True))


@click.command()
def demo() -> None:
    """Sends real gradients, checks the answers.

    They go to a CPU server of the demo's own. The gradients were recorded from training a small convolutional network
    on handwritten digits; random tensors of the size of a ResNet-50 layer follow. The exit code is 1 if an error is out
    of bound.
    """
    console = Console()
    requests = [*_digits(), *_resnet50()]
    with contextlib.ExitStack() as stack:
        begin = time.monotonic()
        console.print("Starting a CPU server. The first start compiles the kernels, for about a minute.")
        with console.status("starting"):
            try:
                server = stack.enter_context(EmbeddedServer())
            except ServerStartError as error:
                raise click.ClickException(str(error)) from error
        client = stack.enter_context(bngrad.Client(server.target))
        devices = client.server_info().devices
        seconds = time.monotonic() - begin
        description = f"{len(devices)} workers: {devices[0].description}"
        console.print(f"Ready on {server.target} after {seconds:.1f} s:\n{description}.")
        answers = [_answer(request, client) for request in track(requests, "Requests", console=console)]
    console.print(_table(requests, answers))
    console.print(_CAPTION)
    wrong = sum(not answer.is_right for answer in answers)
    if wrong:
        raise click.ClickException(f"{wrong} of {len(answers)} answers are out of bound.")
    console.print(f"All {len(answers)} answers are within their bounds.")


def _digits() -> Iterator[Request]:
    """What the batch norms of the network saw in a step of its training, see examples/record_digits.py."""
    with (importlib.resources.files("bngrad_cli.commands") / "digits.npz").open("rb") as file:
        recorded = dict(np.load(file))
    names = ("y_backprop", "x", "scale", "mean", "variance")
    for layer, op, data_format, dtype in (
        ("layer1", "V3", "NCHW", np.float32),
        ("layer2", "V3", "NHWC", np.float32),
        ("layer3", "V3", "NHWC", np.float16),
        ("layer1", "V2", "NHWC", BFLOAT16),
        ("layer2", "V2", "NCHW", np.float32),
        ("layer2", "oneDNN", "NCX", np.float32),
        ("layer3", "oneDNN", "NXC", BFLOAT16),
    ):
        y_backprop, x, *vectors = (recorded[f"{layer}.{name}"] for name in names)
        if data_format.endswith("C"):
            y_backprop, x = np.moveaxis(y_backprop, 1, -1), np.moveaxis(x, 1, -1)
        inputs = (y_backprop.astype(dtype), x.astype(dtype), *vectors)
        yield Request(op, f"digits {layer[-1]}", data_format, float(recorded["epsilon"]), inputs)


def _resnet50() -> Iterator[Request]:
    for dtype in (np.dtype(np.float32), BFLOAT16):
        yield random_request("V3", "NHWC", dtype, _RESNET50_LAYER, "ResNet-50")


def _answer(request: Request, client: bngrad.Client) -> _Answer:
    outputs = request.send(client)
    spec = request.spec
    return _Answer(
        _median_seconds(lambda: request.send(client)),
        tolerances.errors(spec, request.inputs, outputs),
        tolerances.bounds(spec),
    )


def _median_seconds(call: Callable[[], Any]) -> float:
    seconds: list[float] = []
    while sum(seconds) < _TIMED_SECONDS:
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def _table(requests: list[Request], answers: list[_Answer]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    for name in ("op", "data", "shape", "dtype", "format"):
        table.add_column(name, no_wrap=True)
    for name in ("ms", "GB/s", "error", "bound"):
        table.add_column(name, no_wrap=True, justify="right")
    for request, answer in zip(requests, answers, strict=True):
        shape, dtype = request.inputs[0].shape, request.inputs[0].dtype.name
        # The error that comes nearest to its bound speaks for the answer.
        error, bound = max(zip(answer.errors, answer.bounds, strict=True), key=lambda pair: pair[0] / pair[1])
        table.add_row(
            request.op,
            request.data,
            "x".join(map(str, shape)),
            dtype,
            request.data_format,
            f"{1e3 * answer.seconds:.2f}",
            f"{request.nbytes / answer.seconds / 1e9:.2f}",
            f"{error:.1e}",
            f"{bound:.1e}",
            style=None if answer.is_right else "bold red",
        )
    return table
