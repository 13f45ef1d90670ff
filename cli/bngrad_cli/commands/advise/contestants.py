"""Those that can compute a backward pass, and what it takes each of them."""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, TypeAlias

import numpy as np
from rich.console import Console

import bngrad
from bngrad_cli.commands.advise.shapes import DataFormat, Layer
from bngrad_cli.sample_requests import SampleRequest, random_request
from bngrad_cli.target import wait_until_compiled

SERVER, LOCAL, PYTORCH = "server", "local:", "PyTorch"
_WARM_UPS = 2
_MIN_ROUNDS = 3

Backward: TypeAlias = Callable[[SampleRequest], Callable[[], float]]
"""Takes a request, and returns a function that computes it and returns the seconds that this took."""


def find(
    server: bngrad.Client, stack: ExitStack, dtype: np.dtype[Any], console: Console
) -> tuple[dict[str, Backward], dict[str, str]]:
    """Returns the contestants by name, and for those that are not installed the reason.

    With PyTorch each is a layer of it, so that the time is what a training would see; otherwise a call of a client.
    Waits for the kernels of the clients.

    Args:
        server: The client of the server.
        stack: Closes what was opened.
        dtype: The dtype of x.
        console: Says what is waited for.
    """
    clients, missing = {SERVER: server}, {}
    try:
        clients[LOCAL] = stack.enter_context(bngrad.Client("local:"))
    except ModuleNotFoundError as error:
        missing[LOCAL] = str(error)
    for client in clients.values():
        random_request("V3", "NHWC", dtype, (1, 1, 1, 1)).send(client)
        wait_until_compiled(client, console)
    if importlib.util.find_spec("torch") is None:
        missing[PYTORCH] = "it is not installed"
        return {name: _by_client(client) for name, client in clients.items()}, missing
    return {name: _by_layer(client) for name, client in clients.items()} | {PYTORCH: _by_layer(None)}, missing


def milliseconds(
    contestants: Mapping[str, Backward], layer: Layer, dtype: np.dtype[Any], data_format: DataFormat, seconds: float
) -> dict[str, float]:
    """Measures the backward pass of a layer: the contestants take turns, and each has the median of its times.

    Args:
        contestants: What is measured, by name.
        layer: The layer.
        dtype: The dtype of x.
        data_format: The order of the shape's dimensions.
        seconds: How long to measure.
    """
    request = random_request("V3", data_format, dtype, layer.shape)
    runs = {name: make(request) for name, make in contestants.items()}
    for run in runs.values():
        for _ in range(_WARM_UPS):
            run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[SERVER]) < _MIN_ROUNDS:
        for name, run in runs.items():
            times[name].append(1e3 * run())
    return {name: statistics.median(each) for name, each in times.items()}


def _by_client(client: bngrad.Client) -> Backward:
    def make(request: SampleRequest) -> Callable[[], float]:
        def run() -> float:
            start = time.perf_counter()
            request.send(client)
            return time.perf_counter() - start

        return run

    return make


def _by_layer(client: bngrad.Client | None) -> Backward:
    """A layer of PyTorch, which computes its gradients itself without a client."""
    import torch  # noqa: PLC0415 - it may be missing

    from bngrad.torch import BatchNorm2d  # noqa: PLC0415

    def tensor(array: Any) -> torch.Tensor:
        is_bfloat16 = array.dtype.name == "bfloat16"
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if is_bfloat16 else torch.from_numpy(array)

    def make(request: SampleRequest) -> Callable[[], float]:
        y_backprop, x, scale = map(tensor, request.inputs[:3])
        if request.data_format == "NHWC":
            y_backprop, x = (each.movedim(-1, 1) for each in (y_backprop, x))
        layer = BatchNorm2d(len(scale), client=client)
        inputs = (x.requires_grad_(), *layer.parameters())

        def run() -> float:
            y = layer(x)
            start = time.perf_counter()
            torch.autograd.grad(y, inputs, y_backprop)
            return time.perf_counter() - start

        return run

    return make
