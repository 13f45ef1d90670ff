"""The plot: goodput and latency against the load, batch sizes, and memory over time."""

from __future__ import annotations

import textwrap
from itertools import zip_longest
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from benchmarks.load.measure import PERCENTILES, Step, middle
from benchmarks.load.results import Results
from matplotlib.ticker import FuncFormatter

_TOLD_APART = {"OK", "RESOURCE_EXHAUSTED", "NOT_SENT"}


def draw(results: Results, path: Path, title: str) -> None:
    """Writes a PNG; without the panel of batch sizes if the server does not report them."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415 - the backend is chosen first

    steps = results.steps
    batches = [step for step in steps if step.batch_sizes and sum(step.batch_sizes)]
    panels = [_goodput, _latency, *([_batches] if batches else []), _memory]
    figure, axes = plt.subplots(2, 2, figsize=(10.4, 9.6), layout="constrained")
    for panel, axis in zip_longest(panels, axes.flat):
        if panel is None:
            axis.remove()
            continue
        panel(axis, results)
        axis.grid(alpha=0.3, which="both")
    figure.suptitle(textwrap.fill(title, 100))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _goodput(axis: Any, results: Results) -> None:
    steps = results.steps
    offered = [step.offered for step in steps]
    axis.plot(offered, [step.goodput for step in steps], marker="o", label="right answers in time")
    refused = [step.counts["RESOURCE_EXHAUSTED"] / step.seconds for step in steps]
    axis.plot(offered, refused, marker=".", linestyle="--", label="refused")
    other = [sum(n for name, n in step.counts.items() if name not in _TOLD_APART) / step.seconds for step in steps]
    axis.plot(offered, other, marker=".", linestyle="--", color="C3", label="too late, or failed")
    not_sent = [step.counts["NOT_SENT"] / step.seconds for step in steps]
    axis.plot(offered, not_sent, marker=".", linestyle=":", color="C4", label="not sent: every caller waited")
    if results.storm is not None:
        storm = results.storm.step
        axis.plot(storm.offered, storm.goodput, "*", markersize=13, color="C0", label=f"{storm.seconds:.0f} s of storm")
    limit = max(offered, default=1)
    axis.plot([0, limit], [0, limit], color="black", linewidth=0.8, linestyle=":", label="all that is offered")
    if results.saturation:
        saturation = middle(results.saturation).goodput
        axis.axvline(saturation, color="grey", linewidth=0.8, label="saturation (closed loop)")
    axis.set(title="Goodput", xlabel="offered, requests/s", ylabel="requests/s", xlim=(0, None), ylim=(0, None))
    axis.legend(fontsize=8)


def _latency(axis: Any, results: Results) -> None:
    steps = [step for step in results.steps if step.percentiles]
    for i, percentile in enumerate(PERCENTILES):
        axis.plot([step.offered for step in steps], [step.percentiles[i] for step in steps], marker="o", markersize=4,
                  label=f"p{percentile:g}")  # fmt: skip
    axis.axhline(1e3 * results.timeout, color="black", linewidth=0.8, linestyle=":", label="timeout")
    if results.saturation:
        axis.axvline(middle(results.saturation).goodput, color="grey", linewidth=0.8)
    axis.set(title="Latency, from when requests were due", xlabel="offered, requests/s",
             ylabel="milliseconds", yscale="log", xlim=(0, None))  # fmt: skip
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.legend(fontsize=8)


def _batches(axis: Any, results: Results) -> None:
    steps = [step for step in results.steps if step.batch_sizes and sum(step.batch_sizes)]
    width = max(len(step.batch_sizes or ()) for step in steps)
    shares = np.array([_shares(step, width) for step in steps])
    bottom = np.zeros(len(steps))
    for k in range(width):
        if shares[:, k].any():
            label = "1" if k == 0 else f"{2**k}-{2 ** (k + 1) - 1}"
            axis.bar(range(len(steps)), shares[:, k], bottom=bottom, label=label, color=mpl.colormaps["viridis"](k / 7))
            bottom += shares[:, k]
    axis.set_xticks(range(len(steps)), [f"{step.multiple:g}" for step in steps])
    axis.set(title="Requests in a batch", xlabel="offered, times saturation", ylabel="% of batches")
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))


def _shares(step: Step, width: int) -> list[float]:
    sizes = step.batch_sizes or []
    return [100 * size / sum(sizes) for size in sizes] + [0.0] * (width - len(sizes))


def _memory(axis: Any, results: Results) -> None:
    memory = results.memory
    if memory is None or not memory.seconds:
        axis.set(title="Memory: not measured")
        return
    since = np.array(memory.seconds) - memory.seconds[0]
    axis.plot(since, np.add(memory.front, memory.workers), label="front and workers, shared pages for each")
    axis.plot(since, memory.front, linewidth=1, label="front")
    axis.plot(since, memory.private, linewidth=1, label="front and workers, private pages")
    if results.storm is not None:
        start = results.storm.start - memory.seconds[0]
        axis.axvspan(start, start + results.storm.step.seconds, color="grey", alpha=0.2, label="storm")
    axis.set(title="Resident memory of the server", xlabel="seconds", ylabel="MB", ylim=(0, None))
    axis.legend(fontsize=8)
