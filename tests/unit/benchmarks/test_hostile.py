"""The table of attacks, and the figures of `make bench-hostile`."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from benchmarks.hostile.attacks import ATTACKS, Attack
from benchmarks.hostile.results import Outcome, Report, figures, verdict, write_page
from benchmarks.hostile.scene import BOUND_BYTES
from benchmarks.hostile.victim import DOORS, Victim


def turn(during_s: float, after_s: float = 0.001, errors: tuple[str, ...] = (), grown_bytes: int = 0) -> Outcome:
    return Outcome({"tcp": [during_s] * 100}, {"tcp": list(errors)}, {"tcp": [after_s] * 100}, grown_bytes)


QUIET = [turn(0.001), turn(0.5, 0.5), turn(0.001)]
"""Of three turns, one was disturbed."""


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=list(ATTACKS))
def test_each_attack_says_who_does_what_to_which_doors(attack: Attack) -> None:
    assert re.match("(Local )?([Ss]tranger|[Tt]enant): .*[^.]$", attack.description)
    assert set(attack.doors) <= set(DOORS)


def test_the_example_of_the_page_names_attacks_and_doors_that_exist() -> None:
    page = (Path(__file__).parents[3] / "docs/security.md").read_text()
    ((attacks, doors),) = re.findall(r'HOSTILE="--attacks ([\w ]+) --only ([\w ]+)"', page)
    assert set(attacks.split()) <= ATTACKS.keys()
    assert all(set(doors.split()) & set(ATTACKS[name].doors) for name in attacks.split())


def test_what_attackers_know_can_be_given_to_another_process(tmp_path: Path) -> None:
    victim = Victim({"tcp": ("127.0.0.1", 1), "unix": "/dev/shm/x"}, "token", None, 2**28)
    victim.save(tmp_path / "victim")
    assert Victim.load(tmp_path / "victim") == victim


def report(*turns: Outcome, name: str = "x", commit: str = "c") -> Report:
    """Returns a report of one attack, which was beside a row of turns without one."""
    machine = {"cpu": "a CPU", "threads": 2, "python": "3", "commit": commit}
    attack = figures(list(turns), QUIET) | {"description": "Stranger: something", "commit": commit}
    return Report(
        machine, len(turns), {"with limits": {"tcp": {"p99_s": 0.001}}}, [figures(QUIET, QUIET)], {name: attack}
    )


@pytest.mark.parametrize(
    ("measured", "missed"),
    [
        (report(turn(0.019)), None),
        (report(turn(0.03)), "x, tcp: p99 30 ms, 30.0 x quiet"),
        (report(turn(0.001), turn(0.001), turn(0.03)), None),
        (report(turn(0.001), turn(0.03), turn(0.03)), "x, tcp: p99 30 ms, 30.0 x quiet"),
        (report(turn(0.001), turn(0.001, errors=("it failed",))), "x, tcp: 1 errors: it failed"),
        (report(turn(0.001, grown_bytes=BOUND_BYTES + 1), turn(0.001)), "x: memory grew by"),
    ],
    ids=["within", "slow", "slow once", "slow twice", "failed", "memory"],
)
def test_the_verdict_names_each_target_that_is_missed(measured: Report, missed: str | None) -> None:
    lines = list(verdict(measured))
    assert lines[-1].startswith(f"{0 if missed is None else 1} of 1 attacks miss")
    assert missed is None or lines[0].startswith(missed)


def test_what_lasts_is_told_from_what_varies_without_an_attack() -> None:
    lasting = report(turn(0.001, 0.002))
    assert "and every control in 1 of 1 figures: x (tcp 2.0)" in "\n".join(verdict(lasting))
    varying = replace(lasting, controls=[figures([turn(0.001, 0.003)], QUIET)])
    assert "and every control in 0 of 1 figures: none" in "\n".join(verdict(varying))


def test_newer_figures_take_the_place_of_older_ones() -> None:
    older, newer = report(turn(0.03), commit="old"), report(turn(0.01), commit="new")
    other = report(turn(0.02), name="y", commit="old").attacks["y"]
    older.attacks["y"] = other
    merged = Report(**json.loads(json.dumps(asdict(older)))).updated(newer, ["y", "x"])
    assert list(merged.attacks.items()) == [("y", other), ("x", newer.attacks["x"])]
    assert len(merged.controls) == 2


def test_a_page_gets_new_tables_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- attacks: begin -->\nold\n<!-- attacks: end -->\nafter\n")
    shown = report(turn(0.03, 0.002))
    write_page(page, shown)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| quiet, with limits | 1 ms |  |" in text
    assert "| no attack, highest of 1 rows | 1 ms, 1.0 (1.0) |  |" in text
    assert "| x | 30 ms, 30.0 (2.0) | +0 MB |" in text
    assert all(f"- {line}\n" in text for line in verdict(shown))
