"""``bngrad demo``: sends real gradients to a server of its own, and checks every result."""

from __future__ import annotations

import contextlib
import importlib.resources
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import bngrad_server.config  # noqa: F401 - first, so that without the server extra the error names that one; isort: skip
import click
import numpy as np
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

import bngrad
from bngrad_cli.embedded import EmbeddedServer, ServerStartError
from bngrad_cli.sample_requests import BFLOAT16, SampleRequest, random_request
from bngrad_cli.target import wait_until_compiled
from bngrad_cli.terminal import exit_on_sigterm, wide_console
from bngrad_kernels import tolerances

_RESNET50_LAYER = (32, 56, 56, 64)
_TIMED_SECONDS = 0.5
_TIMED_CALLS = 5
_CAPTION = """\
V3 and V2 are FusedBatchNormGradV3 and V2, oneDNN is BatchNormTrainingBackprop.
ms: the median round trip of the client. GB/s: tensors sent and received.
error: the largest error against float64, relative to the sum of the absolute
values of what was added up, of the output that is nearest to its bound."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """The answer to a request: its errors and their bounds."""

    errors: tolerances.Errors
    bounds: tolerances.Errors

    @property
    def is_right(self) -> bool:
        return all(error <= bound for error, bound in zip(self.errors, self.bounds, strict=True))


class _Result(NamedTuple):
    """The answer to a request, and the median time of its calls."""

    answer: _Answer
    seconds: float


@click.command()
def demo() -> None:
    """Checks real gradients on a server of its own.

    The server computes on the CPU. The gradients were recorded while a small convolutional network learnt handwritten
    digits; random tensors of the size of a ResNet-50 layer follow. The exit code is 1 if an error exceeds its bound.
    The command takes about ten seconds, and longer at the first start, which compiles the kernels.
    """
    exit_on_sigterm()
    console = Console()
    requests = [*_digits(), *_resnet50()]
    with contextlib.ExitStack() as stack:
        begin = time.monotonic()
        console.print("Starting a CPU server.")
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
        is_right = "right" if _answer(requests[0], client).is_right else "wrong"
        console.print(f"The first answer is {is_right}, and was there after {time.monotonic() - begin:.1f} s.")
        wait_until_compiled(client, console)
        results = [_measure(request, client) for request in track(requests, "Requests", console=console)]
    wide_console().print(_table(requests, results))
    console.print(_CAPTION)
    wrong = sum(not result.answer.is_right for result in results)
    if wrong:
        raise click.ClickException(f"{wrong} of {len(results)} answers exceed their bounds.")
    console.print(f"All {len(results)} answers are within their bounds.")


def _digits() -> Iterator[SampleRequest]:
    """The inputs of the network's batch norms in one training step, recorded by examples/record_digits.py."""
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
        yield SampleRequest(op, f"digits {layer[-1]}", data_format, float(recorded["epsilon"]), inputs)


def _resnet50() -> Iterator[SampleRequest]:
    for dtype in (np.dtype(np.float32), BFLOAT16):
        yield random_request("V3", "NHWC", dtype, _RESNET50_LAYER, "ResNet-50")


def _measure(request: SampleRequest, client: bngrad.Client) -> _Result:
    return _Result(_answer(request, client), _median_seconds(request, client))


def _answer(request: SampleRequest, client: bngrad.Client) -> _Answer:
    spec, outputs = request.spec, request.send(client)
    return _Answer(tolerances.errors(spec, request.inputs, outputs), tolerances.bounds(spec))


def _median_seconds(request: SampleRequest, client: bngrad.Client) -> float:
    seconds: list[float] = []
    while sum(seconds) < _TIMED_SECONDS or len(seconds) < _TIMED_CALLS:
        begin = time.perf_counter()
        request.send(client)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def _table(requests: list[SampleRequest], results: list[_Result]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    for name in ("op", "data", "shape", "dtype", "format"):
        table.add_column(name, no_wrap=True)
    for name in ("ms", "GB/s", "error", "bound"):
        table.add_column(name, no_wrap=True, justify="right")
    for request, (answer, seconds) in zip(requests, results, strict=True):
        shape, dtype = request.inputs[0].shape, request.inputs[0].dtype.name
        # Show the error that is nearest to its bound.
        error, bound = max(zip(answer.errors, answer.bounds, strict=True), key=lambda pair: pair[0] / pair[1])
        table.add_row(
            request.op,
            request.data,
            "x".join(map(str, shape)),
            dtype,
            request.data_format,
            f"{1e3 * seconds:.2f}",
            f"{request.nbytes / seconds / 1e9:.2f}",
            f"{error:.1e}",
            f"{bound:.1e}",
            style=None if answer.is_right else "bold red",
        )
    return table
