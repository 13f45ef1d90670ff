"""Writes the kernels' tables into docs/performance.md, from the results of each processor: ``make kernels-page``."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.pages import DOCS, RESULTS, Part

_PEERS = {"TensorFlow": ("tensorflow",), "PyTorch": ("pytorch",), "oneDNN": ("onednn", "onednn-graph")}


def _tables() -> str:
    """Returns a table for each file of results."""
    return "\n".join(_table(path) for path in sorted(RESULTS.glob("cpu-kernels-*.json")))


def _table(path: Path) -> str:
    results = json.loads(path.read_text())
    machine, rows = results["machine"], results["rows"]
    versions = machine["versions"]
    peers = ", ".join(f"{title} {versions[names[0]]}" for title, names in _PEERS.items() if names[0] in versions)
    lines = [
        f"{machine['cpu']}, commit {machine['commit']}, {peers}; [all figures](../benchmarks/results/{path.name}):",
        "",
        f"| | {' | '.join(_PEERS)} | the fastest of them | the worst layer |",
        "|---|---|---|---|---|---|",
    ]
    for kind in dict.fromkeys((row["layout"], row["dtype"]) for row in rows):
        layers = [row for row in rows if (row["layout"], row["dtype"]) == kind]
        to_peers = [_mean_to(names, layers) for names in _PEERS.values()]
        to_best = [row["to_best_peer"] for row in layers]
        cells = [*to_peers, f"{_mean(to_best):.2f}", f"{max(to_best):.2f}"]
        lines.append(f"| {' '.join(kind)} | {' | '.join(cells)} |")
    to_best = [row["to_best_peer"] for row in rows]
    lines += [
        "",
        f"Over all {len(rows)} cases bngrad takes {_mean(to_best):.2f} of the time of the fastest other library; it "
        f"is slower in {sum(ratio > 1 for ratio in to_best)} of them.",
        "",
    ]
    return "\n".join(lines)


def _mean_to(names: tuple[str, ...], layers: list[dict[str, Any]]) -> str:
    """The mean time of bngrad to that of the fastest of some others; a dash if they lack the type on this processor."""
    times = [row["milliseconds"] for row in layers]
    rivals = [min((each[name] for name in names if name in each), default=None) for each in times]
    ratios = [each["bngrad"] / rival for each, rival in zip(times, rivals, strict=True) if rival is not None]
    return f"{_mean(ratios):.2f}" if ratios else "-"


def _mean(ratios: list[float]) -> float:
    return statistics.geometric_mean(ratios)


PARTS = (Part(DOCS / "performance.md", "kernels", _tables),)

if __name__ == "__main__":
    for part in PARTS:
        part.write()
