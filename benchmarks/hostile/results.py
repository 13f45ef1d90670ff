"""The figures of attacks: from latencies to rows, verdicts and a page."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.hostile.scene import BOUND_BYTES

TARGET_RATIO = 3.0
TARGET_S = 0.02
TARGET_AFTER = 1.2
_BEGIN, _END = "<!-- attacks: begin -->\n", "<!-- attacks: end -->\n"

Latencies = dict[str, list[float]]
"""Latencies in seconds, by door."""
Figures = dict[str, Any]
"""What `figures` returns."""


@dataclass
class Outcome:
    """What a turn of an attack did.

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
    """Returns the figures of several windows, of which some may have been disturbed.

    The p99 is the median over the windows.
    """
    each_p99 = [quantiles(window)["p99_s"] for window in windows]
    pooled = quantiles([latency for window in windows for latency in window])
    return pooled | {"p99_s": statistics.median(each_p99), "p99_of_windows_s": each_p99}


def figures(turns: list[Outcome], quiet: list[Outcome]) -> Figures:
    """Returns the figures of an attack from its turns: of each p99 the median. Ratios are to the same of ``quiet``."""
    doors = {}
    for door in turns[0].during:
        during, after = (usual([getattr(turn, when)[door] for turn in turns]) for when in ("during", "after"))
        still, still_after = (usual([getattr(turn, when)[door] for turn in quiet]) for when in ("during", "after"))
        errors = [error for turn in turns for error in turn.errors[door]]
        doors[door] = {
            **during,
            "ratio": during["p99_s"] / still["p99_s"],
            "errors": len(errors),
            "first_error": next(iter(errors), None),
            "after_p50_s": after["p50_s"],
            "after_p99_s": after["p99_s"],
            "after_ratio": after["p99_s"] / still_after["p99_s"],
        }
    return {
        "doors": doors,
        "grown_bytes": max(turn.grown_bytes for turn in turns),
        "kept_bytes": max(turn.kept_bytes for turn in turns),
        "remark": next((turn.remark for turn in turns if turn.remark), ""),
    }


@dataclass
class Report:
    """The figures of all attacks.

    Attributes:
        machine: Where they were measured.
        turns: Of each attack.
        quiet: What good clients have without an attack, by the kind of server and by door.
        controls: The figures of each row of turns without an attack: how far ratios are from 1 by chance.
        attacks: The figures of each attack, by name, with its description and the commit that was measured.
    """

    machine: dict[str, Any]
    turns: int
    quiet: dict[str, dict[str, Any]] = field(default_factory=dict)
    controls: list[Figures] = field(default_factory=list)
    attacks: dict[str, Figures] = field(default_factory=dict)

    def updated(self, newer: Report, order: list[str]) -> Report:
        """Returns these figures with newer ones of some attacks in place of theirs, in an order of attacks."""
        attacks = self.attacks | newer.attacks
        return replace(
            newer,
            quiet=self.quiet | newer.quiet,
            controls=self.controls + newer.controls,
            attacks={name: attacks[name] for name in order if name in attacks},
        )

    def highest(self, door: str, key: str) -> float:
        """Returns the highest figure of the controls at a door."""
        return max(float(control["doors"][door][key]) for control in self.controls)


def print_head(doors: list[str]) -> None:
    print(f"{'':24}" + "".join(f"{door:>35}" for door in doors) + "   grown   kept")
    print(
        f"{'':24}" + f"{'p50':>8}{'p99 ms':>9}{'ratio':>7}{'err':>4}{'after':>7}" * len(doors) + "     MB     MB",
        flush=True,
    )


def print_row(name: str, doors: dict[str, Any], rest: str = "") -> None:
    columns = []
    for each in doors.values():
        ratio = f"{each['ratio']:7.1f}{each['errors']:4}{each['after_ratio']:7.1f}" if "ratio" in each else " " * 18
        columns.append(f"{1e3 * each['p50_s']:8.1f}{1e3 * each['p99_s']:9.1f}{ratio}")
    print(f"{name:24}{''.join(columns)}  {rest}", flush=True)


def verdict(report: Report) -> Iterator[str]:
    """Yields a line for each target that is missed, and one in all."""
    missed = set()
    slow = []
    for name, figures in report.attacks.items():
        for door, each in figures["doors"].items():
            if each["ratio"] > TARGET_RATIO and each["p99_s"] > TARGET_S:
                missed.add(name)
                yield f"{name}, {door}: p99 {1e3 * each['p99_s']:.0f} ms, {each['ratio']:.1f} x quiet"
            if each["errors"]:
                missed.add(name)
                yield f"{name}, {door}: {each['errors']} errors: {each['first_error']}"
            if each["after_ratio"] > max(TARGET_AFTER, report.highest(door, "after_ratio")):
                slow.append(f"{name} ({door} {each['after_ratio']:.1f})")
        if figures["grown_bytes"] > BOUND_BYTES:
            missed.add(name)
            yield f"{name}: memory grew by {figures['grown_bytes'] / 1e6:.0f} MB, more than {BOUND_BYTES / 1e6:.0f} MB"
    where = f"{len(slow)} of {sum(len(figures['doors']) for figures in report.attacks.values())} figures"
    after = f"from 2 s after the attack on, p99 is above {TARGET_AFTER} x quiet and every control in {where}"
    yield f"{after}: {', '.join(slow) or 'none'}"
    targets = f"p99 <= {TARGET_RATIO:g} x quiet or {1e3 * TARGET_S:g} ms, no errors, bounded memory"
    yield f"{len(missed)} of {len(report.attacks)} attacks miss: {targets}"


def write_page(path: Path, report: Report) -> None:
    """Replaces the tables of a page."""
    before, rest = path.read_text().split(_BEGIN)
    _, after = rest.split(_END)
    path.write_text(f"{before}{_BEGIN}{_page(report)}{_END}{after}")


def _page(report: Report) -> str:
    machine = report.machine
    doors = list(next(iter(report.quiet.values())))
    commits = ", ".join(dict.fromkeys(figures["commit"] for figures in report.attacks.values()))
    lines = [
        f"{machine['cpu']}, {machine['threads']} threads, Python {machine['python']}, commit {commits}; "
        f"turns of each attack: {report.turns}.",
        "",
        f"| | {' | '.join(doors)} | memory |",
        "|---" * (len(doors) + 2) + "|",
    ]
    for name, each in report.quiet.items():
        lines.append(_row(f"quiet, {name}", (f"{1e3 * figures['p99_s']:.0f} ms" for figures in each.values())))
    highest = (
        f"{1e3 * report.highest(door, 'p99_s'):.0f} ms, "
        f"{report.highest(door, 'ratio'):.1f} ({report.highest(door, 'after_ratio'):.1f})"
        for door in doors
    )
    lines.append(_row(f"no attack, highest of {len(report.controls)} rows", highest))
    for name, result in report.attacks.items():
        cells = (_cell(result["doors"][door]) for door in doors)
        lines.append(_row(name, cells, f"{result['grown_bytes'] / 1e6:+.0f} MB"))
    lines += ["", "The targets:", "", *(f"- {line}" for line in verdict(report))]
    lines += ["", "The attacks:", "", *(f"- {name}: {each['description']}." for name, each in report.attacks.items())]
    return "\n".join(lines) + "\n"


def _row(name: str, cells: Iterable[str], memory: str = "") -> str:
    return f"| {name} | {' | '.join(cells)} | {memory} |"


def _cell(figures: Figures) -> str:
    errors = f", {figures['errors']} errors" if figures["errors"] else ""
    return f"{1e3 * figures['p99_s']:.0f} ms, {figures['ratio']:.1f} ({figures['after_ratio']:.1f}){errors}"
