"""The tables of docs/fleet-model.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_END = "<!-- end of table -->"


def write(results: dict[str, Any], page: Path) -> None:
    """Replaces the tables between the page's marks."""
    text = page.read_text()
    for begin, table in (
        ("<!-- check -->", _check(results["check"])),
        ("<!-- model -->", _model(results["scenarios"])),
    ):
        pattern = f"{re.escape(begin)}.*?{re.escape(_END)}"
        text = re.sub(pattern, f"{begin}\n{table}{_END}", text, flags=re.DOTALL)
    page.write_text(text)


def _check(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| four servers | balancing | goodput, real and model | median, ms | 99th percentile, ms |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        real, model = row["real"], row["model"]
        pairs = [f"{real['goodput']:.3f}, {model['goodput']:.3f}"]
        pairs += [f"{real[name] * 1e3:.0f}, {model[name] * 1e3:.0f}" for name in ("p50_s", "p99_s")]
        lines.append(f"| {row['fleet']} | {row['balancing']} | {' | '.join(pairs)} |")
    return "\n".join(lines) + "\n"


def _model(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| fleet | servers | balancing | goodput | median, ms | 99th percentile, ms | imbalance |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        figures = f"{row['goodput']:.3f} | {row['p50_s'] * 1e3:.0f} | {row['p99_s'] * 1e3:.0f} | {row['imbalance']:.2f}"
        lines.append(f"| {row['fleet']} | {row['servers']:,} | {row['balancing']} | {figures} |")
    return "\n".join(lines) + "\n"
