"""The plot: GB/s against the size of a tensor."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from benchmarks.transport.contestants import CONTESTANTS, NETWORKS
from benchmarks.transport.inputs import label
from benchmarks.transport.results import Results
from matplotlib.ticker import FuncFormatter, NullLocator

_OURS, _FLOOR = "bngrad", "kernel"
_LABEL_STEP = 1.5
"""The least ratio between labelled sizes; labels of closer ones would overlap."""


def draw(results: Results, path: Path) -> None:
    """Writes a PNG with a panel for each network."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415 - the backend is chosen first

    cells = [cell for cell in results.cells if cell.gigabytes_per_second is not None]
    networks = list(dict.fromkeys(cell.network for cell in cells))
    names = list(dict.fromkeys(cell.contestant for cell in cells))
    figure, panels = plt.subplots(
        1, len(networks), figsize=(6.5 * len(networks), 6), sharey=True, squeeze=False, layout="constrained"
    )
    for network, axes in zip(networks, panels[0], strict=True):
        for index, name in enumerate(names):
            points = sorted((c.nbytes, c.gigabytes_per_second or 0) for c in cells
                            if (c.network, c.contestant) == (network, name))  # fmt: skip
            ours = name.startswith(_OURS)
            axes.plot(
                *zip(*points, strict=True), color="black" if name == _FLOOR else f"C{index % 10}", marker="o",
                markersize=4, linewidth=2.4 if ours else 1.3, linestyle="-" if ours else "--",
                label=CONTESTANTS[name].title,
            )  # fmt: skip
        sizes = sorted({cell.nbytes for cell in cells})
        axes.set(xscale="log", yscale="log", title=NETWORKS[network], xlabel="size of each of the three tensors")
        apart = [size for size, before in zip(sizes, [0, *sizes], strict=False) if size >= _LABEL_STEP * before]
        axes.set_xticks(apart, [label(nbytes) for nbytes in apart], rotation=45)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.grid(alpha=0.3, which="both")
    panels[0][0].set_ylabel("GB/s: bytes of all three tensors / p50 of the latency")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
