"""The table and the summary of the kernel benchmark."""

from __future__ import annotations

import math
import platform
import statistics
import subprocess
from dataclasses import dataclass
from operator import truediv
from pathlib import Path
from typing import Any

from benchmarks.kernels.cases import Case
from benchmarks.kernels.rivals import BNGRAD, COPY

from bngrad_kernels.machine import processor

FLOOR_PER_COPY = 1.5
"""The gradient moves three tensors (dy and x in, x_backprop out), a copy two."""
ALL_CORES = 0.95
"""CPU seconds per wall second and thread, below which a rival did not have all its threads."""
MOST_CORES = 0.85
"""The same for a single case: the system counts CPU time in ticks, so a few milliseconds are inexact."""


@dataclass
class Row:
    """The measurements of one case.

    Attributes:
        milliseconds: The median time of each rival that computes the case.
        turns: The median time of each of its turns, in milliseconds.
        cores: CPU seconds per wall second of each.
        spread: Half the distance between the quartiles, relative to the median, of each.
    """

    case: Case
    milliseconds: dict[str, float]
    turns: dict[str, list[float]]
    cores: dict[str, float]
    spread: dict[str, float]

    @property
    def floor(self) -> float:
        return FLOOR_PER_COPY * self.milliseconds[COPY]

    @property
    def to_peers(self) -> dict[str, float]:
        """The time of bngrad to that of each peer: the median over rounds, since the machine may change in between."""
        peers = {name: turns for name, turns in self.turns.items() if name not in (BNGRAD, COPY)}
        ours = self.turns.get(BNGRAD, [])
        return {name: statistics.median(map(truediv, ours, theirs)) for name, theirs in peers.items() if ours}

    @property
    def best_peer(self) -> str | None:
        to_peers = self.to_peers or {name: -time for name, time in self.milliseconds.items() if name != COPY}
        return max(to_peers, key=lambda name: to_peers[name], default=None)

    @property
    def to_best_peer(self) -> float | None:
        return max(self.to_peers.values(), default=None)

    @property
    def subject(self) -> str | None:
        """The rival of the last columns: bngrad, or the best peer if bngrad is left out."""
        return BNGRAD if BNGRAD in self.milliseconds else self.best_peer

    def as_json(self) -> dict[str, Any]:
        case = self.case
        return {
            "layout": case.layout, "dtype": case.dtype, "chw": case.chw, "is_training": case.is_training,
            "milliseconds": self.milliseconds, "to_peers": self.to_peers, "cores": self.cores, "spread": self.spread,
            "floor_milliseconds": self.floor, "best_peer": self.best_peer, "to_best_peer": self.to_best_peer,
        }  # fmt: skip


def header(names: list[str]) -> str:
    columns = "".join(f" {name:>14}" for name in names)
    return f"{'milliseconds, median':25}{columns}{'floor':>9}{'GB/s':>7}{'/peer':>7}{'/floor':>8}  best peer"


def line(row: Row, names: list[str], threads: int) -> str:
    cells = "".join(f"{_cell(row, name, threads):>15}" for name in names)
    subject = row.subject
    tail = f"{row.floor:9.3f}"
    if subject is not None:
        milliseconds = row.milliseconds[subject]
        ratio = "-" if row.to_best_peer is None else f"{row.to_best_peer:.2f}"
        gigabytes = 3 * row.case.spec.tensor_nbytes / milliseconds / 1e6
        tail += f"{gigabytes:7.1f}{ratio:>7}{milliseconds / row.floor:8.2f}  {row.best_peer or '-'}"
    return f"{row.case!s:25}{cells}{tail}"


def _cell(row: Row, name: str, threads: int) -> str:
    if name not in row.milliseconds:
        return "-"
    mark = "" if row.cores[name] >= MOST_CORES * threads else "!"
    return f"{row.milliseconds[name]:.3f}{mark}"


def summary(rows: list[Row], names: list[str], threads: int) -> str:
    lines = []
    short = sum(cores < MOST_CORES * threads for row in rows for cores in row.cores.values())
    if short:
        lines.append(f"! {short} of the times are of rivals that used fewer than {MOST_CORES * threads:.1f} cores")
    for name in names:
        its_rows = [row for row in rows if name in row.milliseconds]
        if its_rows:
            mean = _geometric_mean([row.milliseconds[name] / row.floor for row in its_rows])
            cores = statistics.fmean(row.cores[name] for row in its_rows)
            remark = "" if cores >= ALL_CORES * threads else ": NOT ALL, by its nature or because others ran"
            lines.append(f"{name:>14} / floor: geometric mean {mean:.2f} of {len(its_rows)} cases; "
                         f"{cores:.2f} of {threads} cores{remark}")  # fmt: skip
    compared = [(row.to_best_peer, row) for row in rows if row.to_best_peer is not None]
    if compared:
        worst, at = max(compared, key=lambda pair: pair[0])
        mean = _geometric_mean([ratio for ratio, _ in compared])
        slower = sum(ratio > 1 for ratio, _ in compared)
        lines.append(
            f"{BNGRAD} / best peer: geometric mean {mean:.3f}, slower in {slower} of {len(compared)} cases, "
            f"worst {worst:.2f} ({' '.join(str(at.case).split())}, against {at.best_peer})"
        )
    return "\n".join(lines)


def machine(versions: dict[str, str], threads: int) -> dict[str, Any]:
    """The machine and the versions that the numbers depend on."""
    root = Path(__file__).parent
    git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    return {
        "cpu": processor(),
        "threads": threads,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip(),
        "versions": versions,
    }


def _geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
