"""The plot: goodput, the 99th percentile and imbalance against the number of servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

_PANELS = (
    ("goodput", "answered in time", 1.0, "part of the requests"),
    ("p99_s", "99th percentile", 1e3, "ms"),
    ("imbalance", "imbalance", 1.0, "busiest tenth of the servers ÷ average"),
)


def draw(results: dict[str, Any], path: Path) -> None:
    """Writes a PNG: a row for each kind of fleet, a column for each figure."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415 - the backend is chosen first

    scenarios = results["scenarios"]
    fleets = list(dict.fromkeys(each["fleet"] for each in scenarios))
    figure = plt.figure(figsize=(13, 3.9 * len(fleets)), layout="constrained")
    for part, fleet in zip(figure.subfigures(len(fleets), squeeze=False).flat, fleets, strict=True):
        part.suptitle(fleet, weight="bold")
        row = part.subplots(1, len(_PANELS))
        for axis, (name, title, factor, unit) in zip(row, _PANELS, strict=True):
            for balancing in dict.fromkeys(each["balancing"] for each in scenarios):
                points = [each for each in scenarios if each["fleet"] == fleet and each["balancing"] == balancing]
                sizes = [each["servers"] for each in points]
                axis.plot(
                    sizes,
                    [each[name] * factor for each in points],
                    marker="o",
                    label=balancing,
                )
            axis.set(title=title, xlabel="servers", ylabel=unit, xscale="log")
            axis.set_xticks(sizes, [f"{size:,}" for size in sizes])
            axis.minorticks_off()
            axis.grid(alpha=0.3)
        row[0].set_ylim(0, 1.05)
        row[1].set_ylim(0, None)
        row[0].legend(fontsize="small")
    figure.savefig(path, dpi=100)
    plt.close(figure)
