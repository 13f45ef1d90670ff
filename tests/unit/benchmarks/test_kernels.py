"""What the benchmark of the CPU kernels says of its measurements."""

from __future__ import annotations

import statistics

import pytest
from benchmarks.kernels.cases import Case
from benchmarks.kernels.report import Row


def test_peers_are_compared_round_by_round_since_the_machine_may_change_in_between() -> None:
    turns = {
        "copy": [0.1] * 5,
        "bngrad": [1.0, 1.0, 2.0, 2.0, 2.0],  # the machine became slow amid the third round
        "onednn": [1.25, 1.25, 1.25, 2.5, 2.5],
        "pytorch": [5.0, 5.0, 10.0, 10.0, 10.0],
    }
    medians = {name: statistics.median(times) for name, times in turns.items()}
    row = Row(Case("NHWC", "float32", (64, 8, 8)), medians, turns, {}, {})
    assert row.to_peers == {"onednn": pytest.approx(0.8), "pytorch": pytest.approx(0.2)}
    assert row.best_peer == "onednn"
    assert row.to_best_peer == pytest.approx(0.8)


def test_without_bngrad_the_best_peer_is_the_fastest() -> None:
    medians = {"copy": 0.1, "onednn": 1.0, "pytorch": 2.0}
    row = Row(Case("NHWC", "float32", (64, 8, 8)), medians, {name: [time] for name, time in medians.items()}, {}, {})
    assert (row.best_peer, row.to_best_peer) == ("onednn", None)
