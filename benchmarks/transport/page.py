"""Writes the tables of transports in docs/: ``make transport-page``."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.pages import DOCS, RESULTS, Part
from benchmarks.transport.contestants import CONTESTANTS, NETWORKS, TCP
from benchmarks.transport.inputs import label
from benchmarks.transport.results import Results
from benchmarks.transport.targets import RATE_NBYTES, TARGETS, Target


def _of_each_processor(benchmark: str, *tables: Callable[[Results], list[str]]) -> str:
    """Returns the tables of each of the benchmark's files of results."""
    lines: list[str] = []
    for path in sorted(RESULTS.glob(f"{benchmark}-*.json")):
        document = json.loads(path.read_text())
        results = Results.of_json(document)
        lines += _beginning(path, document["machine"])
        for table in tables:
            lines += [*table(results), ""]
    return "\n".join(lines)


def _targets(results: Results) -> list[str]:
    """Returns the table of the targets' ratios; those that are missed are bold."""
    lines = [f"| | target | {' | '.join(NETWORKS.values())} |", f"|---|---|{'---|' * len(NETWORKS)}"]
    for target in TARGETS:
        relation = "≤" if target.quantity == "time" else "≥"
        ratios = [_ratio(target, results, network) for network in NETWORKS]
        lines.append(f"| {_quotient(target)} | {relation} {target.bound:g} | {' | '.join(ratios)} |")
    return lines


def _quotient(target: Target) -> str:
    at_once = f" with {target.callers} at once" if target.quantity == "requests/s" else ""
    subject, other = CONTESTANTS[target.subject].title, CONTESTANTS[target.other].title
    return f"{target.quantity}{at_once}, {label(target.nbytes)}: {subject} / {other}"


def _ratio(target: Target, results: Results, network: str) -> str:
    ratio = target.ratio(results, network)
    if ratio is None:
        return "-"
    return f"{ratio:.2f}" if target.met(ratio) else f"**{ratio:.2f}**"


def _medians(results: Results) -> list[str]:
    """Returns the table of the median times over TCP, in milliseconds."""
    cells = [cell for cell in results.cells if cell.network == TCP]
    sizes = sorted({cell.nbytes for cell in cells})
    lines = [f"| ms | {' | '.join(map(label, sizes))} |", f"|---|{'---|' * len(sizes)}"]
    for name in dict.fromkeys(cell.contestant for cell in cells):
        times = [results.p50(TCP, nbytes, name) for nbytes in sizes]
        lines.append(f"| {CONTESTANTS[name].title} | {' | '.join(map(_milliseconds, times))} |")
    return lines


def _rates(results: Results) -> list[str]:
    """Returns the table of the requests per second over TCP."""
    rates = [rate for rate in results.rates if rate.network == TCP]
    callers = sorted({rate.callers for rate in rates})
    title = f"requests/s, {label(RATE_NBYTES)}"
    lines = [f"| {title} | {' | '.join(f'{count} at once' for count in callers)} |", f"|---|{'---|' * len(callers)}"]
    for name in dict.fromkeys(rate.contestant for rate in rates):
        cells = [f"{results.rate(TCP, count, name) or 0:.0f}" for count in callers]
        lines.append(f"| {CONTESTANTS[name].title} | {' | '.join(cells)} |")
    return lines


def _beginning(path: Path, machine: dict[str, Any]) -> list[str]:
    versions = machine["versions"]
    device = machine.get("device", machine["cpu"])
    place = machine["cpu"] if device.startswith(machine["cpu"]) else f"{device}; {machine['cpu']}"
    return [
        f"{place}, {machine['threads']} threads, commit {machine['commit']}, grpcio {versions['grpcio']}, "
        f"Arrow {versions['pyarrow']}; [all figures](../benchmarks/results/{path.name}):",
        "",
    ]


def _milliseconds(time: float | None) -> str:
    """Writes a time with two significant digits, or all those before the point."""
    if time is None:
        return "-"
    return f"{time:.0f}" if time >= 10 else f"{time:#.2g}"


PARTS = (
    Part(DOCS / "transport.md", "transports", partial(_of_each_processor, "transport", _targets)),
    Part(DOCS / "performance.md", "transports", partial(_of_each_processor, "transport", _medians)),
    Part(DOCS / "security.md", "tls", partial(_of_each_processor, "tls", _medians, _rates)),
    Part(DOCS / "cuda.md", "gpu-transport", partial(_of_each_processor, "gpu-transport", _medians, _rates)),
    Part(DOCS / "performance.md", "triton", partial(_of_each_processor, "triton", _medians, _rates)),
)

if __name__ == "__main__":
    for part in PARTS:
        part.write()
