"""A server and a load that all faults share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faults import workload
from tests.faults.harness import Harness, warm_up
from tests.faults.load import Load
from tests.faults.machine_faults import shiftable_clock
from tests.faults.server import RestartableServer


@pytest.fixture(scope="session")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The load's requests, with the answers of an idle server."""
    path = tmp_path_factory.mktemp("faults") / "problems"
    with RestartableServer() as service:
        workload.save(workload.answered_alone(service.target), path)
    return path


@pytest.fixture(scope="session")
def scene(problems: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    """A warm server, and the load on it."""
    clock, environment = shiftable_clock(tmp_path_factory.mktemp("clock"))
    with RestartableServer(environment=environment) as service, Load(service, problems) as load:
        scene = Harness(service, load, clock)
        warm_up(scene)
        yield scene
