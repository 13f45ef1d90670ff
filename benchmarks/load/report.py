"""The tables, for a terminal and for a page."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.load.answers import Status
from benchmarks.load.measure import PERCENTILES, Step, middle
from benchmarks.load.results import Results
from benchmarks.load.targets import Verdict

_BEGIN, _END = "<!-- measured: begin -->", "<!-- measured: end -->"
_STATUSES = {
    Status.RESOURCE_EXHAUSTED: "refused", Status.DEADLINE_EXCEEDED: "too late", Status.UNAVAILABLE: "unavail.",
    Status.OTHER: "other", Status.WRONG: "wrong", Status.NOT_SENT: "not sent",
}  # fmt: skip
_COLUMNS = [
    "load", "offered/s", "OK/s", "MB/s", *(f"p{each:g} ms" for each in PERCENTILES), "OK", *_STATUSES.values(),
    "sent late", "no caller", "in flight", "server", "gen.",
]  # fmt: skip


def header() -> str:
    rule = "|".join("-" * (max(len(c), 6) + 2 if i else _TITLE + 2) for i, c in enumerate(_COLUMNS))
    return f"{_line(_COLUMNS, _COLUMNS)}\n|{rule}|"


def row(step: Step) -> str:
    percentiles = [f"{value:.1f}" for value in step.percentiles] or ["-"] * len(PERCENTILES)
    server = "-" if step.server_cores is None else f"{step.server_cores:.2f}"
    cells = [
        step.title, f"{step.offered:.0f}", f"{step.goodput:.0f}", f"{step.megabytes:.0f}", *percentiles,
        str(step.counts["OK"]), *(str(step.counts[each.name]) for each in _STATUSES),
        f"{step.late:.1%}", f"{step.no_caller:.1%}", str(step.in_flight), server, f"{step.generator_cores:.2f}",
    ]  # fmt: skip
    return _line(cells, _COLUMNS)


def batch_table(steps: Iterable[Step]) -> str:
    """The share of batches of each size; empty if the server does not report them."""
    known = [(step.title, step.batch_sizes) for step in steps if step.batch_sizes and sum(step.batch_sizes)]
    if not known:
        return ""
    width = 1 + max(k for _, sizes in known for k, size in enumerate(sizes) if size)
    columns = ["requests in a batch", *(_span(k) for k in range(width))]
    rows = [
        [title, *(f"{sizes[k] / sum(sizes):.1%}" if k < len(sizes) else "0.0%" for k in range(width))]
        for title, sizes in known
    ]
    return _table(columns, rows)


def summary(results: Results, verdicts: Sequence[Verdict]) -> str:
    """Returns all tables except the one that was printed during the measurement."""
    parts = []
    if results.storm is not None:
        quiet = results.storm.quiet
        first, *rest = (f"{value:.2f}" for value in results.storm.after)
        parts.append(
            f"A single request took {statistics.median(quiet):.2f} ms ({min(quiet):.2f} to {max(quiet):.2f}) before "
            f"any load; the first one after the storm took {first} ms, those after it {', '.join(rest)} ms."
        )
    if results.memory is not None and results.memory.seconds:
        totals = [sum(each) for each in zip(results.memory.front, results.memory.workers, strict=True)]
        parts.append(
            f"Resident memory of the front and its workers together, memory that clients share included: "
            f"{totals[0]:.0f} MB at the start, {max(totals):.0f} MB at most, {totals[-1]:.0f} MB at the end."
        )
    parts.append(batch_table([*results.steps, *([results.storm.step] if results.storm else [])]))
    rows = [[v.target, f"{v.bound:g}", f"{v.figure:.3g}", "met" if v.met else "**not met**"] for v in verdicts]
    parts.append(_table(["target", "bound", "measured", ""], rows))
    return "\n\n".join(part for part in parts if part)


def write_into(page: Path, results: Results, verdicts: Sequence[Verdict], note: str) -> None:
    """Replaces the text between two marks of a page by the tables.

    Raises:
        ValueError: The page lacks the marks.
    """
    text = page.read_text()
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"{page} must hold {_BEGIN} and {_END}")
    saturation = [middle(results.saturation)] if results.saturation else []
    steps = [*saturation, *results.steps, *([results.storm.step] if results.storm else [])]
    kills = [*results.kills.undisturbed, *results.kills.disturbed] if results.kills else []
    others = [*kills, *(step for turn in results.batching.values() for step in turn)]
    tables = [
        _table(_COLUMNS, [[cell.strip() for cell in row(step).strip("|").split("|")] for step in part])
        for part in (steps, others)
    ]
    content = "\n\n".join([note, tables[0], summary(results, verdicts), tables[1]])
    page.write_text(f"{before}{begin}\n{content}\n{end}{after}")


def _span(k: int) -> str:
    return "1" if k == 0 else f"{2**k} to {2 ** (k + 1) - 1}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
             for line in (columns, *rows)]  # fmt: skip
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def _line(cells: Sequence[str], columns: Sequence[str]) -> str:
    first, *rest = zip(cells, columns, strict=True)
    return "| " + " | ".join([first[0].ljust(_TITLE), *(cell.rjust(max(len(c), 6)) for cell, c in rest)]) + " |"


_TITLE = 19
