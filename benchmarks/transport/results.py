"""The measurements, and how they are printed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from benchmarks.transport.contestants import EMPTY
from benchmarks.transport.inputs import label

_RATIOS_TO = {
    "grpc-echo": "/echo",
    "flight": "/flight",
    "protobuf": "/protobuf",
    "kernel": "/kernel",
    "sockets": "/sockets",
    "triton": "/triton",
}


@dataclass(frozen=True)
class Cell:
    """The latency of one contestant at one size of each of the three tensors over one network, in milliseconds."""

    network: str
    nbytes: int
    contestant: str
    calls: int
    best: float
    p50: float
    p99: float

    @classmethod
    def of(cls, network: str, nbytes: int, contestant: str, seconds: list[float]) -> Cell:
        best, p50, p99 = 1e3 * np.percentile(seconds, (0, 50, 99))
        return cls(network, nbytes, contestant, len(seconds), float(best), float(p50), float(p99))

    @classmethod
    def of_json(cls, cell: Mapping[str, Any]) -> Cell:
        """Reads what `as_json` returned."""
        times = cell["best_ms"], cell["p50_ms"], cell["p99_ms"]
        return cls(cell["network"], cell["tensor_bytes"], cell["contestant"], cell["calls"], *times)

    @property
    def gigabytes_per_second(self) -> float | None:
        """The throughput of all three tensors; None for an empty call."""
        return None if self.contestant == EMPTY else 3 * self.nbytes / self.p50 / 1e6

    def as_json(self) -> dict[str, Any]:
        return {
            "network": self.network, "tensor_bytes": self.nbytes, "contestant": self.contestant, "calls": self.calls,
            "best_ms": self.best, "p50_ms": self.p50, "p99_ms": self.p99, "gb_per_s": self.gigabytes_per_second,
        }  # fmt: skip


@dataclass(frozen=True)
class Rate:
    network: str
    callers: int
    contestant: str
    per_second: float


@dataclass
class Results:
    cells: list[Cell] = field(default_factory=list)
    rates: list[Rate] = field(default_factory=list)

    @classmethod
    def of_json(cls, document: Mapping[str, Any]) -> Results:
        """Reads what `as_json` returned."""
        return cls([Cell.of_json(cell) for cell in document["cells"]], [Rate(**rate) for rate in document["rates"]])

    def as_json(self) -> dict[str, Any]:
        return {"cells": [cell.as_json() for cell in self.cells], "rates": [asdict(rate) for rate in self.rates]}

    def p50(self, network: str, nbytes: int, contestant: str) -> float | None:
        return next((c.p50 for c in self.cells if (c.network, c.nbytes, c.contestant) == (network, nbytes, contestant)),
                    None)  # fmt: skip

    def rate(self, network: str, callers: int, contestant: str) -> float | None:
        return next((r.per_second for r in self.rates
                     if (r.network, r.callers, r.contestant) == (network, callers, contestant)), None)  # fmt: skip


def header(names: Collection[str]) -> str:
    """The columns for these contestants: ratios to those among them that others are compared with."""
    ratios = "".join(f"{title:>10}" for name, title in _RATIOS_TO.items() if name in names)
    return (f"{'3 x tensor':>10}  {'contestant':19}{'p50 ms':>10}{'p99 ms':>10}{'calls':>7}{'GB/s':>8}{ratios}"
            "   (times of p50)")  # fmt: skip


def lines(cells: list[Cell]) -> str:
    """The contestants at one size over one network."""
    p50 = {cell.contestant: cell.p50 for cell in cells}
    return "\n".join(_line(cell, p50) for cell in cells)


def _line(cell: Cell, p50: Mapping[str, float]) -> str:
    speed = cell.gigabytes_per_second
    ratios = "".join(f"{cell.p50 / p50[name]:10.2f}" for name in _RATIOS_TO if name in p50)
    return (
        f"{label(cell.nbytes):>10}  {cell.contestant:19}{cell.p50:10.3f}{cell.p99:10.3f}{cell.calls:7}"
        f"{'-' if speed is None else f'{speed:.3f}':>8}{ratios}"
    )


RATE_HEADER = f"{'callers':>10}  {'contestant':19}{'requests/s':>11}{'/echo':>8}"


def rate_lines(rates: list[Rate]) -> str:
    """The contestants with one number of callers."""
    echo = next((rate.per_second for rate in rates if rate.contestant == "grpc-echo"), None)
    return "\n".join(
        f"{rate.callers:10}  {rate.contestant:19}{rate.per_second:11.0f}"
        f"{'-' if echo is None else f'{rate.per_second / echo:.2f}':>8}"
        for rate in rates
    )
