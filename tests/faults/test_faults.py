"""Each fault for two seconds; `make soak` injects them for longer, and several at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from tests.faults import workload
from tests.faults.catalog import FAULTS, FULL
from tests.faults.harness import Fault, Harness, endure
from tests.faults.load import Load
from tests.faults.machine_faults import HOUR_S, set_clock, shiftable_clock
from tests.faults.server import RestartableServer

SECONDS = 2.0


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_under_every_fault_all_requests_are_answered_and_nothing_leaks(scene: Harness, fault: Fault) -> None:
    endure(scene, [fault], SECONDS, Random(fault.name))


def test_a_server_goes_on_when_dev_shm_fills_up(problems: Path, tmp_path: Path) -> None:
    with RestartableServer(shm="256k") as service, Load(service, problems) as load:
        endure(Harness(service, load, tmp_path), [FULL], SECONDS, Random(0))


def test_a_server_starts_without_shared_memory_when_dev_shm_is_full(problems: Path) -> None:
    """No file can be created there, so memory cannot be shared; "auto" does without."""
    with RestartableServer(shm="4k,nr_inodes=1") as service:
        assert list(service.addresses()) == ["TCP", "Unix"]
        for problem, again in zip(workload.load(problems), workload.answered_alone(service.target), strict=True):
            assert problem.is_answered_by(again.outputs)


def test_the_clock_of_a_process_can_be_set(tmp_path: Path) -> None:
    clock, environment = shiftable_clock(tmp_path)
    code = "import time; print(time.time(), time.monotonic())"
    times = []
    for shift_s in (0.0, HOUR_S, -HOUR_S):
        set_clock(clock, shift_s)
        ran = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, **environment}, stdout=subprocess.PIPE, check=True
        )
        times.append([float(word) for word in ran.stdout.split()])
    (wall, steady), (later, second), (earlier, third) = times
    assert later - wall == pytest.approx(HOUR_S, abs=30)
    assert earlier - wall == pytest.approx(-HOUR_S, abs=30)
    assert 0 < second - steady < third - steady < 30
