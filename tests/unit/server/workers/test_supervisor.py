"""When a supervisor kills its worker, and what it tells the next one; the workers say what the tests give them."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from tests.unit.server.workers.additions import TIMEOUT_S, wait_until

from bngrad_server.errors import WorkerDiedError, WorkerStartError
from bngrad_server.memory.regions import Region
from bngrad_server.scheduling.batcher import Batcher
from bngrad_server.workers import supervisor as module
from bngrad_server.workers.ipc import Report, pickled
from bngrad_server.workers.supervisor import Supervisor

READY = pickled(("a device", 0), Report.READY)
HEARTBEAT = Report.HEARTBEAT + b"0"
SILENCE = None
LATE = Report.HEARTBEAT + b"1"
"""A heartbeat amid a batch that takes too long."""


class Delays(threading.Event):
    """Is not waited for: notes for how long it would have been."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.noted.append(timeout)
        return self.is_set()


class Process:
    """Sends the given reports, and then none until it is told to end."""

    slots, busy_s, resident_bytes = 2, 0.0, 0

    def __init__(self, reports: list[bytes | None]) -> None:
        self.reports = reports
        self.regions: list[tuple[int, Region | None]] = []
        self.timeouts: list[float] = []
        self.killed = self.is_late = False
        self._ended = threading.Event()

    def receive_report(self, timeout_s: float) -> bytes | None:
        self.timeouts.append(timeout_s)
        if not self.reports:
            assert self._ended.wait(TIMEOUT_S)
            return b""
        report = self.reports.pop(0)
        self.is_late = report == LATE
        return report

    def change_region(self, number: int, region: Region | None) -> None:
        self.regions.append((number, region))

    def flush_pending(self) -> None: ...

    def kill(self) -> None:
        self.killed = True
        self.shut_down()

    def shut_down(self) -> None:
        self._ended.set()

    def close(self) -> str:
        return "ended"


Supervise = Callable[..., tuple[Supervisor, list[Process]]]


@pytest.fixture
def supervise() -> Iterator[Supervise]:
    started: list[Supervisor] = []

    def supervise(*reports: list[bytes | None]) -> tuple[Supervisor, list[Process]]:
        processes = [Process(each) for each in reports]
        coming: Any = iter(processes)
        supervisor = Supervisor("cpu", lambda: next(coming), 10.0, Batcher(8, 2**20), lambda: None)
        started.append(supervisor)
        return supervisor, processes

    yield supervise
    for supervisor in started:
        supervisor.begin_to_stop()
        supervisor.stop(TIMEOUT_S)


@pytest.mark.parametrize(
    ("reports", "reason"),
    [
        pytest.param([SILENCE, SILENCE], "for sending no heartbeat for 10 s", id="silent"),
        pytest.param([SILENCE, HEARTBEAT, LATE], "for taking too long over a batch", id="late"),
    ],
)
def test_a_worker_that_hangs_is_killed_and_replaced(
    supervise: Supervise, reports: list[bytes | None], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor, (first, second) = supervise([READY, *reports], [READY])
    supervisor.start()
    wait_until(lambda: supervisor.status().restarts == 1 and supervisor.is_ready)
    assert (first.killed, second.killed) == (True, False)
    assert f"worker of device cpu ended {reason}" in caplog.text


def test_a_worker_that_dies_once_it_is_ready_is_replaced_like_any_other(
    supervise: Supervise, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor, (_, second, _) = supervise([READY, b""], [READY, b""], [READY])
    supervisor.map(Region(1, b"", -1, 1, ""))
    monkeypatch.setattr(second, "change_region", mock.Mock(side_effect=WorkerDiedError("closed its socket")))
    supervisor.start()
    wait_until(lambda: supervisor.status().restarts == 2 and supervisor.is_ready)
    assert caplog.text.count("worker of device cpu ended") == 2
    assert "cannot be started" not in caplog.text


def test_a_single_silence_kills_no_worker(supervise: Supervise) -> None:
    """The front process itself may have been stopped for a while."""
    supervisor, (only,) = supervise([READY, *[SILENCE, HEARTBEAT] * 5])
    supervisor.start()
    wait_until(lambda: not only.reports)
    assert not only.killed
    assert supervisor.status().restarts == 0


@pytest.mark.parametrize(("looks", "is_killed"), [(5, False), (9, True)])
def test_no_batch_is_late_for_a_time_in_which_the_front_process_itself_was_stopped(
    supervise: Supervise, monkeypatch: pytest.MonkeyPatch, looks: int, is_killed: bool
) -> None:
    waits_s, clock = [0.0, 60.0, *looks * [4.0], 0.0], SimpleNamespace(now=0.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    supervisor, (first, _) = supervise([READY, LATE, *looks * [LATE]], [READY])
    receive_report = first.receive_report

    def receive_late(timeout_s: float) -> bytes | None:
        clock.now += waits_s.pop(0)
        return receive_report(timeout_s)

    monkeypatch.setattr(first, "receive_report", receive_late)
    supervisor.start()
    wait_until(lambda: first.killed or len(waits_s) == 0)
    assert first.killed is is_killed


def test_a_worker_that_replaces_another_is_told_of_the_regions_that_are_left(supervise: Supervise) -> None:
    supervisor, (first, second) = supervise([READY], [READY])
    kept, ended = Region(1, b"", -1, 1, ""), Region(2, b"", -1, 1, "")
    supervisor.map(kept)
    supervisor.start()
    assert supervisor.wait_until_ready(TIMEOUT_S)
    supervisor.map(ended)
    supervisor.unmap(ended)
    assert first.regions == [(1, kept), (2, ended), (2, None)]
    first.kill()
    wait_until(lambda: supervisor.status().restarts == 1 and supervisor.is_ready)
    assert second.regions == [(1, kept)]
    slots: list[object] = list(supervisor._batcher._free)
    assert slots == [second] * 2


def test_workers_that_die_again_and_again_are_started_ever_later(supervise: Supervise) -> None:
    ended = b""
    supervisor, _ = supervise([READY, ended], [ended], [ended], [READY])
    began = time.monotonic()
    supervisor.start()
    wait_until(lambda: supervisor.status().restarts == 3 and supervisor.is_ready)
    assert time.monotonic() - began >= 0.1 + 0.2 + 0.4


def test_changes_of_regions_that_are_left_over_are_sent_with_each_report(supervise: Supervise) -> None:
    supervisor, (first, second) = supervise([READY, HEARTBEAT], [READY])
    first.flush_pending = flush = mock.Mock(side_effect=WorkerDiedError("died"))  # type: ignore[method-assign]
    supervisor.start()
    wait_until(lambda: flush.call_count == 2)
    first.change_region = mock.Mock(side_effect=WorkerDiedError("died"))  # type: ignore[method-assign]
    region = Region(1, b"", -1, 1, "")
    supervisor.map(region)
    supervisor.unmap(region)
    supervisor.map(region)
    first.kill()
    wait_until(lambda: supervisor.status().restarts == 1 and supervisor.is_ready)
    assert second.regions == [(1, region)]


def test_the_delay_is_short_again_after_a_worker_that_was_sound(
    supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SOUND_AFTER_S", -1.0)  # each that is ready at all
    ended = b""
    supervisor, _ = supervise([READY, ended], [ended], [ended], [READY, ended], [READY])
    supervisor._closing = delays = Delays()
    supervisor.start()
    wait_until(lambda: supervisor.status().restarts == 4 and supervisor.is_ready)
    assert delays.noted == [0.05, 0.1, 0.2, 0.05]


def test_a_start_that_fails_is_tried_again(supervise: Supervise) -> None:
    supervisor, (first, second) = supervise([READY, b""], [READY])
    no_memory = OSError(errno.ENOMEM, "Cannot allocate memory")
    supervisor._start_process = mock.Mock(side_effect=[first, no_memory, no_memory, second])
    supervisor.start()
    wait_until(lambda: supervisor.status().restarts == 3 and supervisor.is_ready)


def test_each_change_is_told_when_it_can_be_seen(supervise: Supervise) -> None:
    supervisor, (first, _) = supervise([READY], [READY])
    seen: list[bool] = []
    supervisor._on_change = lambda: seen.append(supervisor.is_ready)
    supervisor.start()
    wait_until(lambda: seen == [True])
    first.kill()
    wait_until(lambda: supervisor.status().restarts == 1 and supervisor.is_ready)
    wait_until(lambda: seen == [True, False, True])


def test_the_busy_time_of_all_workers_of_a_device_counts(supervise: Supervise) -> None:
    supervisor, processes = supervise([READY, b""], [READY, b""], [READY])
    for process, busy_s in zip(processes, (1.0, 2.0, 4.0), strict=True):
        process.busy_s = busy_s
    supervisor.start()
    wait_until(lambda: supervisor.status().restarts == 2 and supervisor.is_ready)
    assert supervisor.status().busy_s == 7.0


def test_a_worker_has_all_regions_before_it_gets_work(supervise: Supervise) -> None:
    supervisor, (only,) = supervise([READY])
    offered: list[int] = []
    only.change_region = lambda *_: offered.append(len(supervisor._batcher._free))  # type: ignore[method-assign]
    supervisor.map(Region(1, b"", -1, 1, ""))
    supervisor.start()
    assert supervisor.wait_until_ready(TIMEOUT_S)
    assert offered == [0]


@pytest.mark.parametrize(("report", "is_killed"), [(READY, False), (HEARTBEAT, True)], ids=["ready", "starting"])
def test_a_stop_ends_a_worker_at_once_by_force_only_while_it_starts(
    supervise: Supervise, report: bytes, is_killed: bool
) -> None:
    """One that compiles a kernel would notice only after that."""
    supervisor, (only,) = supervise([report])
    supervisor.start()
    wait_until(lambda: not only.reports and supervisor.is_ready is not is_killed)
    supervisor.begin_to_stop()
    assert (only._ended.is_set(), only.killed) == (True, is_killed)


def test_a_worker_whose_start_a_stop_did_not_see_ends_unused(supervise: Supervise) -> None:
    supervisor, (only,) = supervise([READY])

    def start_while_stopping() -> Any:
        supervisor.begin_to_stop()
        return only

    supervisor._start_process = start_while_stopping
    supervisor.start()
    wait_until(lambda: not supervisor._thread.is_alive())
    assert only.reports == [READY]


@pytest.mark.parametrize(
    ("reports", "problem"),
    [
        pytest.param([], "the worker of device cpu ended before it was ready", id="ended"),
        pytest.param([Report.FAILED + b"no driver"], "device cpu cannot be used: no driver", id="failed"),
    ],
)
def test_a_worker_that_ends_before_it_is_ready_fails_the_start_and_is_not_replaced(
    supervise: Supervise, reports: list[bytes | None], problem: str
) -> None:
    supervisor, _ = supervise([*reports, b""])
    supervisor.start()
    with pytest.raises(WorkerStartError, match=problem):
        supervisor.wait_until_ready(TIMEOUT_S)
    wait_until(lambda: not supervisor._thread.is_alive())
    assert supervisor.status().restarts == 0


def test_no_delay_of_a_start_is_longer_than_five_seconds(supervise: Supervise) -> None:
    ended = b""
    supervisor, _ = supervise([READY, ended], *([ended] for _ in range(7)), [READY])
    supervisor._closing = delays = Delays()
    supervisor.start()
    wait_until(lambda: supervisor.status().restarts == 8 and supervisor.is_ready)
    assert delays.noted == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


def test_a_worker_that_does_not_end_when_it_is_told_is_killed_after_the_timeout(supervise: Supervise) -> None:
    supervisor, (only,) = supervise([READY])
    only.shut_down = lambda: None  # type: ignore[method-assign]
    only.kill = killed = mock.Mock(side_effect=only._ended.set)  # type: ignore[method-assign]
    supervisor.start()
    assert supervisor.wait_until_ready(TIMEOUT_S)
    supervisor.begin_to_stop()
    assert not killed.called
    supervisor.stop(0)
    assert killed.called


def test_a_worker_may_be_silent_for_longer_until_it_is_ready(supervise: Supervise) -> None:
    supervisor, (only,) = supervise([SILENCE, READY, Report.HEARTBEAT + b"7"])
    supervisor.start()
    wait_until(lambda: len(only.timeouts) == 4)
    assert only.timeouts == [30, 30, 5, 5]  # two such silences are too many
    assert supervisor.status().memory_used_bytes == 7


def test_a_worker_is_not_blamed_for_the_failure_of_the_one_before(
    supervise: Supervise, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor, _ = supervise([READY, Report.FAILED + b"no memory", b""], [READY, b""], [READY])
    supervisor.start()
    wait_until(lambda: supervisor.status().restarts == 2 and supervisor.is_ready)
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert errors == ["worker of device cpu ended: no memory", "worker of device cpu ended"]
