"""Writes the GPU's tables into docs/cuda.md, from the results of an H100: ``make kernels-page``."""

from __future__ import annotations

import json
import statistics
from typing import Any

from benchmarks.pages import DOCS, RESULTS, Part

_FILES = {32: "gpu-kernels-h100.json", 256: "gpu-kernels-h100-batch256.json"}
_BEFORE = "gpu-kernels-h100-before.json"

Row = dict[str, Any]


def _tables() -> str:
    results = {batch: json.loads((RESULTS / name).read_text()) for batch, name in _FILES.items()}
    before = json.loads((RESULTS / _BEFORE).read_text())
    first = results[32]
    machine = first["machine"]
    return "\n".join(
        [
            f"{machine['device']}, driver {machine['nvidia_smi'].splitlines()[-1].split(', ')[1]}, NVRTC "
            f"{machine['nvrtc']}, PyTorch {machine['torch']}, cuDNN {machine['cudnn']}, commit {machine['commit']}; all "
            "figures: " + ", ".join(f"[batch {batch}](../benchmarks/results/{name})" for batch, name in _FILES.items())
            + f", [before](../benchmarks/results/{_BEFORE}). ResNet-50's layers, geometric means:",
            "",
            "| time over that of | PyTorch | the faster of PyTorch and cuDNN | the worst layer | a copy of three tensors | batch 256: "
            "PyTorch | the faster | worst | a copy |",
            "|---|---|---|---|---|---|---|---|---|",
            *_layers(results[32]["layers"], results[256]["layers"]),
            "",
            f"{_overall(results[32]['layers'], before['layers'])}",
            "",
            "| second order, training, microseconds | bngrad | before | PyTorch | five tensors copied |",
            "|---|---|---|---|---|",
            *_second_order(first["second_order"], before["second_order"]),
            "",
        ]
    )  # fmt: skip


def _layers(small: list[Row], large: list[Row]) -> list[str]:
    lines = []
    for kind in dict.fromkeys((row["is_training"], row["layout"], row["dtype"]) for row in small):
        cells: list[str] = []
        for rows in (small, large):
            own = [row for row in rows if (row["is_training"], row["layout"], row["dtype"]) == kind]
            to_best = [row["to_best_peer"] for row in own]
            to_pytorch = [row["seconds"]["bngrad"] / row["seconds"]["pytorch"] for row in own]
            means = (to_pytorch, to_best), (max(to_best),), ([row["to_floor"] for row in own],)
            cells += [f"{_mean(each):.2f}" if isinstance(each, list) else f"{each:.2f}" for part in means for each in part]
        is_training, layout, dtype = kind
        lines.append(f"| {'training' if is_training else 'inference'} {layout} {dtype} | {' | '.join(cells)} |")
    return lines


def _overall(rows: list[Row], before: list[Row]) -> str:
    old = {row["case"]: row["seconds"]["bngrad"] for row in before}

    def saved(is_training: bool) -> str:
        return f"{1 - _mean([r['seconds']['bngrad'] / old[r['case']] for r in rows if r['is_training'] == is_training]):.0%}"

    to_best = [row["to_best_peer"] for row in rows]
    return (
        f"At batch 32 bngrad takes {_mean(to_best):.2f} of the time of the faster library over all {len(rows)} cases, and "
        f"is slower in {sum(ratio > 1 for ratio in to_best)}. Before the kernels had seen a GPU it was "
        f"{_mean([row['to_best_peer'] for row in before]):.2f} and {sum(row['to_best_peer'] > 1 for row in before)}: what the "
        f"GPU showed saves {saved(True)} of the time in training and {saved(False)} in inference."
    )


def _second_order(rows: list[Row], before: list[Row]) -> list[str]:
    old = {row["case"]: row["seconds"] for row in before}
    return [
        f"| {' '.join(row['case'].replace('training', '').split())} | "
        + " | ".join(
            f"{1e6 * seconds:,.0f}"
            for seconds in (row["seconds"], old[row["case"]], row["pytorch_seconds"], row["floor_seconds"])
        )
        + " |"
        for row in rows
    ]


def _mean(ratios: list[float]) -> float:
    return statistics.geometric_mean(ratios)


PARTS = (Part(DOCS / "cuda.md", "gpu", _tables),)

if __name__ == "__main__":
    for part in PARTS:
        part.write()
