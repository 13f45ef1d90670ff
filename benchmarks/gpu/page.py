"""Writes the GPU's tables into docs/cuda.md, from the results of an H100: ``make kernels-page``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from statistics import geometric_mean
from typing import Any

from benchmarks.pages import DOCS, RESULTS, Part

_NOW, _LARGE, _BEFORE = (f"gpu-kernels-h100{suffix}.json" for suffix in ("", "-batch256", "-before"))

Row = dict[str, Any]


def _tables() -> str:
    now, large, before = (json.loads((RESULTS / name).read_text()) for name in (_NOW, _LARGE, _BEFORE))
    lines = [
        _machine(now["machine"]),
        "",
        "| time over that of | PyTorch | the faster of PyTorch and cuDNN | the worst layer | a copy of three tensors "
        "| batch 256: PyTorch | the faster | worst | a copy |",
        "|---|---|---|---|---|---|---|---|---|",
        *_layers(now["layers"], large["layers"]),
        "",
        _overall(now["layers"], before["layers"]),
        "",
        "| second order, training, microseconds | bngrad | before | PyTorch | five tensors copied |",
        "|---|---|---|---|---|",
        *_second_order(now["second_order"], before["second_order"]),
        "",
    ]
    return "\n".join(lines)


def _machine(machine: Row) -> str:
    driver = machine["nvidia_smi"].splitlines()[-1].split(", ")[1]
    device = machine["device"].replace(", driver", ", CUDA driver")
    files = {"batch 32": _NOW, "batch 256": _LARGE, "before": _BEFORE}
    links = ", ".join(f"[{name}](../benchmarks/results/{file})" for name, file in files.items())
    return (
        f"{device}, driver {driver}, NVRTC {machine['nvrtc']}, PyTorch {machine['torch']}, cuDNN "
        f"{machine['cudnn']}, commit {machine['commit']}; all figures: {links}. ResNet-50's layers, geometric means:"
    )


def _layers(small: list[Row], large: list[Row]) -> Iterator[str]:
    """A row of the first table for each mode, layout and element type."""
    for kind in dict.fromkeys(map(_kind, small)):
        is_training, layout, dtype = kind
        cells = [cell for rows in (small, large) for cell in _ratios([row for row in rows if _kind(row) == kind])]
        yield f"| {'training' if is_training else 'inference'} {layout} {dtype} | {' | '.join(cells)} |"


def _kind(row: Row) -> tuple[bool, str, str]:
    return row["is_training"], row["layout"], row["dtype"]


def _ratios(rows: list[Row]) -> Iterator[str]:
    """To PyTorch, to the faster of PyTorch and cuDNN, the worst of these, and to a copy."""
    to_best = [row["to_best_peer"] for row in rows]
    to_pytorch = [row["seconds"]["bngrad"] / row["seconds"]["pytorch"] for row in rows]
    for ratio in (
        geometric_mean(to_pytorch),
        geometric_mean(to_best),
        max(to_best),
        geometric_mean([row["to_floor"] for row in rows]),
    ):
        yield f"{ratio:.2f}"


def _overall(rows: list[Row], before: list[Row]) -> str:
    old = {row["case"]: row["seconds"]["bngrad"] for row in before}
    saved = [
        1
        - geometric_mean(
            [row["seconds"]["bngrad"] / old[row["case"]] for row in rows if row["is_training"] == is_training]
        )
        for is_training in (True, False)
    ]
    mean, slower = _to_best(rows)
    old_mean, old_slower = _to_best(before)
    return (
        f"At batch 32 bngrad takes {mean:.2f} of the time of the faster library over all {len(rows)} cases, and is "
        f"slower in {slower}. Before the kernels had seen a GPU it was {old_mean:.2f} and {old_slower}: what the GPU "
        f"showed saves {saved[0]:.0%} of the time in training and {saved[1]:.0%} in inference."
    )


def _to_best(rows: list[Row]) -> tuple[float, int]:
    """The mean ratio to the faster library, and in how many cases bngrad is slower."""
    ratios = [row["to_best_peer"] for row in rows]
    return geometric_mean(ratios), sum(ratio > 1 for ratio in ratios)


def _second_order(rows: list[Row], before: list[Row]) -> Iterator[str]:
    old = {row["case"]: row["seconds"] for row in before}
    for row in rows:
        times = row["seconds"], old[row["case"]], row["pytorch_seconds"], row["floor_seconds"]
        case = " ".join(row["case"].replace("training", "").split())
        yield f"| {case} | {' | '.join(f'{1e6 * seconds:,.0f}' for seconds in times)} |"


PARTS = (Part(DOCS / "cuda.md", "gpu", _tables),)

if __name__ == "__main__":
    for part in PARTS:
        part.write()
