"""The table of attacks, and the figures of `make bench-hostile`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from benchmarks.hostile.attacks import ATTACKS, Attack
from benchmarks.hostile.results import Outcome, figures, verdict, write_page
from benchmarks.hostile.scene import BOUND_BYTES
from benchmarks.hostile.victim import Victim

QUIET = {"own": [[0.001] * 100, [0.5] * 100, [0.001] * 100]}
"""Latencies in three turns, of which one was disturbed."""


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=list(ATTACKS))
def test_each_attack_says_who_does_what_to_which_doors(attack: Attack) -> None:
    assert re.match("(Local )?([Ss]tranger|[Tt]enant): .*[^.]$", attack.description)
    assert set(attack.doors) <= {"grpcio", "own", "unix", "regions", "http"}


def test_what_attackers_know_can_be_given_to_another_process(tmp_path: Path) -> None:
    victim = Victim({"own": ("127.0.0.1", 1), "unix": "/dev/shm/x"}, "token", None, 2**28)
    victim.save(tmp_path / "victim")
    assert Victim.load(tmp_path / "victim") == victim


def result(during_s: float, *, errors: tuple[str, ...] = (), grown_bytes: int = 0) -> dict[str, dict[str, Any]]:
    outcome = Outcome({"own": [during_s] * 100}, {"own": list(errors)}, {"own": [0.001] * 100}, grown_bytes)
    return {"x": figures(outcome, QUIET)}


@pytest.mark.parametrize(
    ("results", "missed"),
    [
        (result(0.019), None),
        (result(0.03), "x, own: p99 30 ms, 30.0 x quiet"),
        (result(0.001, errors=("it failed",)), "x, own: 1 errors: it failed"),
        (result(0.001, grown_bytes=BOUND_BYTES + 1), "x: memory grew by"),
    ],
    ids=["within", "slow", "failed", "memory"],
)
def test_the_verdict_names_each_target_that_is_missed(results: dict[str, dict[str, Any]], missed: str | None) -> None:
    lines = list(verdict(results))
    assert lines[-1].startswith(f"{0 if missed is None else 1} of 1 attacks miss")
    assert missed is None or lines[0].startswith(missed)


def test_a_page_gets_new_tables_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- attacks: begin -->\nold\n<!-- attacks: end -->\nafter\n")
    results = {"x": result(0.03)["x"] | {"description": "Stranger: something"}}
    quiet: dict[str, dict[str, dict[str, Any]]] = {"with limits": {"own": {"p99_s": 0.001}}}
    write_page(page, results, quiet, {"cpu": "a CPU", "threads": 2, "python": "3", "commit": "c"})
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| x | 30 ms, 30.0 (1.0) | +0 MB |" in text
