"""What the pool waits for, tells its workers, and says of them."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from functools import partial
from typing import Any

import pytest

from bngrad_server.config import ServerConfig
from bngrad_server.memory.layout import Place
from bngrad_server.memory.regions import Region
from bngrad_server.workers import pool
from bngrad_server.workers.ipc import AheadChange
from bngrad_server.workers.supervisor import Supervisor


class SlowSupervisor(Supervisor):
    """Becomes ready when the pool has said twice that it waits."""

    waits = 0

    def start(self) -> None: ...

    def wait_until_ready(self, timeout_s: float | None = None) -> bool:
        assert timeout_s is not None
        self.waits += 1
        return self.waits > 2


class StuckSupervisor(Supervisor):
    """Has a worker that does not end."""

    waited_s = 0.0
    is_told = False

    def begin_to_stop(self) -> None:
        self.is_told = True

    def stop(self, timeout_s: float) -> None:
        self.waited_s = timeout_s
        time.sleep(timeout_s)


def pool_of(*devices: str, workers: int = 1) -> pool.WorkerPool:
    nothing: Any = threading.Event()
    return pool.WorkerPool(ServerConfig(workers=workers), devices, nothing, nothing, lambda: None)


def test_a_slow_start_is_explained_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool, "Supervisor", SlowSupervisor)
    workers = pool_of("cuda:0")
    with caplog.at_level(logging.INFO, pool.logger.name):
        workers.start()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert all(line.startswith("waiting for the workers: ") for line in said)


def test_a_start_waits_for_every_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "Supervisor", SlowSupervisor)
    workers = pool_of("cuda:0", "cuda:1")
    workers.start()
    assert [supervisor.waits for supervisor in supervisors_of(workers)] == [3, 3]


def supervisors_of(workers: pool.WorkerPool) -> list[Any]:
    return list(workers._supervisors)


def test_one_ready_worker_makes_a_pool_ready_and_only_its_slots_count() -> None:
    workers = pool_of("cpu", "cuda:0", workers=2)
    seen = [(workers.is_ready, workers.slots)]
    for supervisor in reversed(supervisors_of(workers)):
        supervisor._ready_since = time.monotonic()
        seen.append((workers.is_ready, workers.slots))
    assert seen == [(False, 0), (True, 2), (True, 3), (True, 4)]


def test_every_worker_is_told_of_a_region_and_of_its_end() -> None:
    workers = pool_of("cpu", "cuda:0", workers=2)
    region = Region(1, b"", -1, 1, "")
    workers.map(region)
    assert [supervisor._regions for supervisor in supervisors_of(workers)] == [{1: region}] * 3
    workers.unmap(region)
    assert [supervisor._regions for supervisor in supervisors_of(workers)] == [{}] * 3


def test_several_workers_that_do_not_end_delay_the_end_as_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "Supervisor", StuckSupervisor)
    monkeypatch.setattr(pool, "_STOP_TIMEOUT_S", 0.1)
    workers = pool_of("cpu", workers=4)
    workers.close()
    assert sum(supervisor.waited_s for supervisor in supervisors_of(workers)) <= 0.1
    assert all(supervisor.is_told for supervisor in supervisors_of(workers))


def test_copies_are_spread_among_the_gpus_and_dropped_where_they_are() -> None:
    workers, changes = pool_of("cuda:0", "cpu", "cuda:1"), list[tuple[str, AheadChange]]()
    for supervisor in supervisors_of(workers):
        supervisor.change_ahead = partial(note, changes, supervisor.name)
    numbers = [workers.copy_ahead(Place(1, 256 * i), 100) for i in range(4)]
    for number in numbers:
        workers.drop_copy(number)
    copied, dropped = changes[:4], changes[4:]
    assert [change for _, change in copied] == [AheadChange(n, 1, 256 * i, 100) for i, n in enumerate(numbers)]
    assert [change for _, change in dropped] == [AheadChange(n) for n in numbers]
    assert [name for name, _ in dropped] == [name for name, _ in copied]
    assert Counter(name for name, _ in copied) == {"cuda:0": 2, "cuda:1": 2}


def note(changes: list[tuple[str, AheadChange]], name: str, change: AheadChange) -> None:
    changes.append((name, change))
