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
import ml_dtypes
import numpy as np
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

import bngrad
from bngrad_kernels import accuracy
from bngrad_kernels.problem import Array
from bngrad_kernels.spec import Spec
from bngrad_server.embedded import EmbeddedServer, ServerStartError

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_RESNET50_LAYER = (32, 56, 56, 64)
_TIMED_SECONDS = 0.5
_CAPTION = """\
V3 and V2 are FusedBatchNormGradV3 and V2, oneDNN is BatchNormTrainingBackprop.
ms: the median round trip, client to client. GB/s: tensors sent and received.
error: the largest against float64, of x_backprop (relative to its largest
value) and of the two sums (relative to the sum of their terms' moduli);
whichever is nearer to its bound."""


@dataclass(frozen=True, slots=True)
class _Request:
    """A call to make.

    Attributes:
        op: V3, V2 or oneDNN.
        data: Where the tensors come from.
        data_format: As the op takes it.
        epsilon: As the op takes it.
        inputs: y_backprop, x, scale, mean, variance.
    """

    op: str
    data: str
    data_format: str
    epsilon: float
    inputs: tuple[Array, ...]

    @property
    def spec(self) -> Spec:
        y_backprop, _, scale, _, _ = self.inputs
        axis = y_backprop.ndim - 1 if self.data_format.endswith("C") else 1
        return Spec(y_backprop.dtype, y_backprop.shape, axis, stats_dtype=scale.dtype, epsilon=self.epsilon)

    def send(self, client: bngrad.Client) -> tuple[Array, ...]:
        y_backprop, x, scale, mean, variance = self.inputs
        attributes: dict[str, Any] = {"epsilon": self.epsilon, "data_format": self.data_format}
        if self.op == "oneDNN":
            return client.batch_norm_training_backprop(x, y_backprop, mean, variance, scale, **attributes)
        if self.op == "V2":
            return client.fused_batch_norm_grad_v2(y_backprop, x, scale, mean, variance, **attributes)
        return client.fused_batch_norm_grad_v3(y_backprop, x, scale, mean, variance, None, **attributes)


@dataclass(frozen=True, slots=True)
class _Answer:
    """What came of a request: how long it took, how much was carried, how far it was off."""

    seconds: float
    nbytes: int
    errors: accuracy.Errors
    bounds: accuracy.Errors

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


def _digits() -> Iterator[_Request]:
    """What the batch norms of the network saw in a step of its training, see examples/record_digits.py."""
    with (importlib.resources.files("bngrad_server.cli") / "digits.npz").open("rb") as file:
        recorded = dict(np.load(file))
    names = ("y_backprop", "x", "scale", "mean", "variance")
    for layer, op, data_format, dtype in (
        ("layer1", "V3", "NCHW", np.float32),
        ("layer2", "V3", "NHWC", np.float32),
        ("layer3", "V3", "NHWC", np.float16),
        ("layer1", "V2", "NHWC", _BFLOAT16),
        ("layer2", "V2", "NCHW", np.float32),
        ("layer2", "oneDNN", "NCX", np.float32),
        ("layer3", "oneDNN", "NXC", _BFLOAT16),
    ):
        y_backprop, x, *vectors = (recorded[f"{layer}.{name}"] for name in names)
        if data_format.endswith("C"):
            y_backprop, x = np.moveaxis(y_backprop, 1, -1), np.moveaxis(x, 1, -1)
        inputs = (y_backprop.astype(dtype), x.astype(dtype), *vectors)
        yield _Request(op, f"digits {layer[-1]}", data_format, float(recorded["epsilon"]), inputs)


def _resnet50() -> Iterator[_Request]:
    rng = np.random.default_rng(0)
    y_backprop, x = (rng.standard_normal(_RESNET50_LAYER, np.float32) for _ in range(2))
    vectors = [rng.uniform(0.5, 1.5, _RESNET50_LAYER[-1]).astype(np.float32) for _ in range(3)]
    for dtype in (np.float32, _BFLOAT16):
        inputs = (y_backprop.astype(dtype), x.astype(dtype), *vectors)
        yield _Request("V3", "ResNet-50", "NHWC", 1e-5, inputs)


def _answer(request: _Request, client: bngrad.Client) -> _Answer:
    outputs = request.send(client)
    spec = request.spec
    return _Answer(
        _median_seconds(lambda: request.send(client)),
        sum(array.nbytes for array in (*request.inputs, *outputs)),
        accuracy.errors(spec, request.inputs, outputs),
        accuracy.bounds(spec),
    )


def _median_seconds(call: Callable[[], Any]) -> float:
    seconds: list[float] = []
    while sum(seconds) < _TIMED_SECONDS:
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def _table(requests: list[_Request], answers: list[_Answer]) -> Table:
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
            f"{answer.nbytes / answer.seconds / 1e9:.2f}",
            f"{error:.1e}",
            f"{bound:.1e}",
            style=None if answer.is_right else "bold red",
        )
    return table
