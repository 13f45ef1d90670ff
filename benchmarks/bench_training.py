"""Time of a whole training step of a small residual network in PyTorch: stock, and with bngrad's batch normalisation.

All contestants train the same network on the same batches and take turns of some steps, of which the first is not
counted: caches and memory are then another contestant's. Server and training share the machine's cores. The training
keeps the memory that it frees: by itself, glibc returns some of it to the system, now in one contestant's steps and now
in another's, and to get it again takes up to a sixth of a step.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Literal, TypeAlias

import torch
from benchmarks.training.resnet import batches, small_resnet
from benchmarks.warm_server import WarmServer
from torch import nn

import bngrad
import bngrad.torch
from bngrad.typing import Transport

_Where: TypeAlias = Literal["everywhere", "measured"]
_WARM_UPS = 11
"""Steps before the clock starts: measured placements are fixed in the first ten."""
_TURN = 5
"""Steps of a turn."""
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4

_CONTESTANTS: dict[str, tuple[str | None, Transport, _Where] | None] = {
    "stock": None,
    "shared": (None, "shared", "everywhere"),
    "tcp": (None, "stream", "everywhere"),
    "measured": (None, "auto", "measured"),
    "local:": ("local:", "auto", "everywhere"),
    "local: measured": ("local:", "auto", "measured"),
}
"""The target, None for the server, the transport, and where the gradients are computed."""


class _Training:
    def __init__(self, client: bngrad.Client | None, where: _Where, *, channels_last: bool, bfloat16: bool) -> None:
        self._format = torch.channels_last if channels_last else torch.contiguous_format
        self._bfloat16 = bfloat16
        self._network = small_resnet().to(memory_format=self._format)  # type: ignore[call-overload]
        if client is not None:
            bngrad.torch.convert_batchnorm(self._network, client, where=where)
        self._optimizer = torch.optim.SGD(self._network.parameters(), lr=0.05, momentum=0.9)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> float:
        """Returns the seconds of one step."""
        images = images.to(memory_format=self._format)
        start = time.perf_counter()
        self._optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=self._bfloat16):
            loss = nn.functional.cross_entropy(self._network(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return time.perf_counter() - start


def _medians(runs: Sequence[_Training], data: Sequence[tuple[torch.Tensor, torch.Tensor]], steps: int) -> list[float]:
    """Returns the median of each contestant's steps, in seconds."""
    for batch in data[:_WARM_UPS]:
        for run in runs:
            run.step(*batch)
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(-(-steps // (_TURN - 1))):
        for run, counted in zip(runs, seconds, strict=True):
            counted.extend([run.step(*batch) for batch in data[_WARM_UPS:]][1:])
    return list(map(statistics.median, seconds))


def _keep_freed_memory() -> None:
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    libc.mallopt(_M_MMAP_MAX, 0)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_training", description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="that are counted, of each contestant")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu", help="of the server: cpu or cuda:N")
    options = parser.parse_args()
    _keep_freed_memory()
    torch.set_num_threads(options.threads)
    data = batches(_WARM_UPS + _TURN, options.batch)
    with ExitStack() as stack:
        server = stack.enter_context(WarmServer(device=options.device))
        print(f"{'ms per step, median':32}" + "".join(f"{name:>16}" for name in _CONTESTANTS) + "   ratios to stock")
        clients: list[tuple[bngrad.Client | None, _Where]] = [
            (None, "everywhere")
            if how is None
            else (stack.enter_context(bngrad.Client(how[0] or server.target, transport=how[1])), how[2])
            for how in _CONTESTANTS.values()
        ]
        for bfloat16, channels_last in itertools.product((False, True), repeat=2):
            runs = [_Training(*each, channels_last=channels_last, bfloat16=bfloat16) for each in clients]
            medians = _medians(runs, data, options.steps)
            label = f"{'bfloat16 autocast' if bfloat16 else 'float32'}, {'channels_last' if channels_last else 'NCHW'}"
            ratios = "".join(f"{median / medians[0]:8.2f}" for median in medians[1:])
            print(f"{label:32}" + "".join(f"{1e3 * median:16.1f}" for median in medians) + ratios, flush=True)


if __name__ == "__main__":
    main()
