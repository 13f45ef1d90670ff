"""The targets of bngrad's transports, over either network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.transport.contestants import EMPTY, KERNEL, NETWORKS
from benchmarks.transport.inputs import KB, MB, label
from benchmarks.transport.results import Results

RATE_NBYTES = 4 * KB
"""The size of a tensor when measuring requests per second."""


@dataclass(frozen=True)
class Target:
    """A bound on a ratio of bngrad's to another contestant.

    Attributes:
        quantity: "time" of a call is to be at most ``bound`` times the other's; "requests/s" of callers at least that.
        callers: For "requests/s".
    """

    quantity: Literal["time", "requests/s"]
    subject: str
    other: str
    bound: float
    nbytes: int = RATE_NBYTES
    callers: int = 1

    def ratio(self, results: Results, network: str) -> float | None:
        """Returns the ratio; None if one of the two was not measured."""
        names = self.subject, self.other
        if self.quantity == "requests/s":
            subject, other = (results.rate(network, self.callers, name) for name in names)
        else:
            subject, other = (results.p50(network, self.nbytes, name) for name in names)
        if not subject or not other:
            return None
        return subject / other

    def met(self, ratio: float) -> bool:
        return ratio <= self.bound if self.quantity == "time" else ratio >= self.bound

    def __str__(self) -> str:
        relation = "<=" if self.quantity == "time" else ">="
        callers = f", {self.callers} callers" if self.quantity == "requests/s" else ""
        return (
            f"{self.quantity} of {self.subject} {relation} {self.bound:g} x {self.other}, {label(self.nbytes)}{callers}"
        )


_SIZES = (4 * KB, 100 * KB, 512 * KB, 1 * MB, 8 * MB, 25 * MB, 64 * MB, 100 * MB)
_LARGE = 8 * MB

TARGETS = (
    *(Target("time", "bngrad-auto", "flight", 1, nbytes) for nbytes in _SIZES),
    *(Target("time", "bngrad-stream", "flight", 1 if nbytes < _LARGE else 0.5, nbytes) for nbytes in _SIZES),
    *(Target("requests/s", name, "flight", 1, callers=callers)
      for name in ("bngrad-auto", "bngrad-stream") for callers in (1, 64)),
    Target("time", "bngrad-unary", "grpc-echo", 1.6),
    Target("time", "bngrad-shared", EMPTY, 1.5),
    Target("time", "bngrad-shared", KERNEL, 1.25, 25 * MB),
    Target("time", "bngrad-shared", KERNEL, 1.1, 100 * MB),
)  # fmt: skip


def verdicts(results: Results, networks: list[str]) -> list[dict[str, Any]]:
    """Returns each target over each network with its ratio and whether it is met; both None if not measured."""
    rows = []
    for network in networks:
        for target in TARGETS:
            ratio = target.ratio(results, network)
            met = None if ratio is None else target.met(ratio)
            rows.append({"network": network, "target": str(target), "ratio": ratio, "met": met})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the targets whose contestants were measured."""
    return "\n".join(
        f"{NETWORKS[row['network']]:14}{row['target']:68}{row['ratio']:8.2f}  {'met' if row['met'] else 'NOT MET'}"
        for row in rows
        if row["ratio"] is not None
    )
