"""The figures of attacks: from latencies to rows, verdicts and a page."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.hostile.scene import BOUND_BYTES

TARGET_RATIO = 3.0
TARGET_S = 0.02
TARGET_AFTER = 1.2
_BEGIN, _END = "<!-- attacks: begin -->\n", "<!-- attacks: end -->\n"

Latencies = dict[str, list[float]]
Windows = dict[str, list[list[float]]]
"""Latencies at each door, by turns."""
Figures = dict[str, dict[str, Any]]
"""Of each attack or door, by name."""


@dataclass
class Outcome:
    """What an attack did.

    Attributes:
        during: The latencies at each door.
        errors: The errors at each door.
        after: The latencies at each door, from two seconds after the attack on.
        grown_bytes: How much the memory of the front process grew at most.
        kept_bytes: How much of that was left two seconds after the attack and the measurement after it.
        remark: What went wrong with the attack itself.
    """

    during: Latencies = field(default_factory=dict)
    errors: dict[str, list[str]] = field(default_factory=dict)
    after: Latencies = field(default_factory=dict)
    grown_bytes: int = 0
    kept_bytes: int = 0
    remark: str = ""


def quantiles(latencies: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(latencies, n=100, method="inclusive") if len(latencies) > 1 else latencies * 99
    return {"calls": len(latencies), "p50_s": cuts[49], "p99_s": cuts[98], "max_s": max(latencies)}


def usual(windows: list[list[float]]) -> dict[str, Any]:
    """Returns the figures of a quiet server from several windows, of which some may have been disturbed.

    The p99 is the median over the windows.
    """
    each_p99 = [quantiles(window)["p99_s"] for window in windows]
    pooled = quantiles([latency for window in windows for latency in window])
    return pooled | {"p99_s": statistics.median(each_p99), "p99_of_windows_s": each_p99}


def figures(outcome: Outcome, quiet: Windows) -> dict[str, Any]:
    doors = {}
    for door, latencies in outcome.during.items():
        reference = usual(quiet[door])
        during, after = quantiles(latencies), quantiles(outcome.after[door])
        errors = outcome.errors[door]
        doors[door] = {
            **during,
            "ratio": during["p99_s"] / reference["p99_s"],
            "errors": len(errors),
            "first_error": next(iter(errors), None),
            "after_p50_s": after["p50_s"],
            "after_p99_s": after["p99_s"],
            "after_ratio": after["p99_s"] / reference["p99_s"],
        }
    return {
        "doors": doors,
        "grown_bytes": outcome.grown_bytes,
        "kept_bytes": outcome.kept_bytes,
        "remark": outcome.remark,
    }


def print_head(doors: list[str]) -> None:
    print(f"{'':24}" + "".join(f"{door:>35}" for door in doors) + "   grown   kept")
    print(
        f"{'':24}" + f"{'p50':>8}{'p99 ms':>9}{'ratio':>7}{'err':>4}{'after':>7}" * len(doors) + "     MB     MB",
        flush=True,
    )


def print_row(name: str, doors: Figures, rest: str = "") -> None:
    columns = []
    for each in doors.values():
        ratio = f"{each['ratio']:7.1f}{each['errors']:4}{each['after_ratio']:7.1f}" if "ratio" in each else " " * 18
        columns.append(f"{1e3 * each['p50_s']:8.1f}{1e3 * each['p99_s']:9.1f}{ratio}")
    print(f"{name:24}{''.join(columns)}  {rest}", flush=True)


def verdict(results: Figures) -> Iterator[str]:
    """Yields a line for each target that is missed, and one in all."""
    missed = set()
    for name, figures in results.items():
        for door, each in figures["doors"].items():
            if each["ratio"] > TARGET_RATIO and each["p99_s"] > TARGET_S:
                missed.add(name)
                yield f"{name}, {door}: p99 {1e3 * each['p99_s']:.0f} ms, {each['ratio']:.1f} x quiet"
            if each["errors"]:
                missed.add(name)
                yield f"{name}, {door}: {each['errors']} errors: {each['first_error']}"
        if figures["grown_bytes"] > BOUND_BYTES:
            missed.add(name)
            yield f"{name}: memory grew by {figures['grown_bytes'] / 1e6:.0f} MB, more than {BOUND_BYTES / 1e6:.0f} MB"
    slow = [
        f"{name} ({door} {each['after_ratio']:.1f})"
        for name, figures in results.items()
        for door, each in figures["doors"].items()
        if each["after_ratio"] > TARGET_AFTER
    ]
    yield f"from 2 s after the attack on, p99 above {TARGET_AFTER} x quiet: {', '.join(slow) or 'none'}"
    targets = f"p99 <= {TARGET_RATIO:g} x quiet or {1e3 * TARGET_S:g} ms, no errors, bounded memory"
    yield f"{len(missed)} of {len(results)} attacks miss: {targets}"


def write_page(path: Path, results: Figures, quiet: dict[str, Figures], machine: dict[str, Any]) -> None:
    """Replaces the tables of a page."""
    before, rest = path.read_text().split(_BEGIN)
    _, after = rest.split(_END)
    path.write_text(f"{before}{_BEGIN}{_page(results, quiet, machine)}{_END}{after}")


def _page(results: Figures, quiet: dict[str, Figures], machine: dict[str, Any]) -> str:
    doors = list(next(iter(quiet.values())))
    lines = [
        f"{machine['cpu']}, {machine['threads']} threads, Python {machine['python']}, commit {machine['commit']}.",
        "",
        f"| | {' | '.join(doors)} | memory |",
        "|---" * (len(doors) + 2) + "|",
    ]
    for name, each in quiet.items():
        cells = " | ".join(f"{1e3 * figures['p99_s']:.0f} ms" for figures in each.values())
        lines.append(f"| quiet, {name} | {cells} | |")
    for name, result in results.items():
        during = " | ".join(_cell(figures) for figures in result["doors"].values())
        lines.append(f"| {name} | {during} | {result['grown_bytes'] / 1e6:+.0f} MB |")
    lines += ["", *(f"- {name}: {each['description']}." for name, each in results.items())]
    return "\n".join(lines) + "\n"


def _cell(figures: dict[str, Any]) -> str:
    errors = f", {figures['errors']} errors" if figures["errors"] else ""
    return f"{1e3 * figures['p99_s']:.0f} ms, {figures['ratio']:.1f} ({figures['after_ratio']:.1f}){errors}"
