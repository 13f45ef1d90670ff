"""Worker processes as the front process sees them, with other programs in place of the worker's."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from typing import Any, Protocol

import psutil
import pytest
from tests.unit.server.scheduling.workers import SPEC, job

from bngrad_server.config import ServerConfig
from bngrad_server.memory.arena import Arena
from bngrad_server.memory.regions import Region
from bngrad_server.workers import process
from bngrad_server.workers.ipc import AheadChange, Report
from bngrad_server.workers.process import WorkerProcess

TIMEOUT_S = 20.0
REGION_FD = os.memfd_create("region")
PROGRAM = """
import os, signal, socket, sys, time
heartbeat, ahead = (socket.socket(fileno=int(fd)) for fd in sys.argv[4:6])
slots = [socket.socket(fileno=int(fd)) for fd in sys.argv[11:]]
def report(what):
    heartbeat.send(repr(what).encode())
"""
SLEEPS = "time.sleep(600)"
LOADS_A_LIBRARY = """
from bngrad_server.workers import main
main.backends.create = lambda *device, **limits: time.sleep(600)
main.main()
"""
ENDS_WITH_ITS_SLOTS = "[slot.recv(1) for slot in slots]"
STOPS = "signal.signal(signal.SIGTERM, signal.SIG_IGN); report('stops'); os.kill(os.getpid(), signal.SIGSTOP)"
COUNTS_CHANGES = """
def drained(slot):
    try:
        while True:
            slot.recv(1 << 17, socket.MSG_DONTWAIT)
            counts[slot] += 1
    except BlockingIOError:
        return counts[slot]
counts = dict.fromkeys(slots, 0)
while ahead.recv(100):
    report([drained(slot) for slot in slots])
"""


class Start(Protocol):
    def __call__(self, program: str, device: str = "cuda:0", slots: int = 1, **settings: Any) -> WorkerProcess: ...


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(2**20)
    yield arena
    arena.close()


@pytest.fixture
def start(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    started = []

    def start(program: str, device: str = "cuda:0", slots: int = 1, **settings: Any) -> WorkerProcess:
        def command(module: str, *arguments: object) -> list[str]:
            assert module == "bngrad_server.workers.main"
            return [sys.executable, "-c", PROGRAM + program, *map(str, arguments)]

        monkeypatch.setattr(process, "module_command", command)
        started.append(WorkerProcess(device, ServerConfig(**settings), arena, 0.25, slots))
        return started[-1]

    yield start
    for worker in started:
        worker.kill()
        worker.close()


def report_of(worker: WorkerProcess) -> Any:
    report = worker.receive_report(TIMEOUT_S)
    assert report
    return ast.literal_eval(report.decode())


def has_ended(worker: WorkerProcess) -> bool:
    return worker.receive_report(TIMEOUT_S) == b""


@pytest.mark.parametrize("pinned_bytes", [0, 2**30])
def test_a_worker_is_told_its_device_and_its_limits(start: Start, arena: Arena, pinned_bytes: int) -> None:
    """The reserve of the arena counts as no pinned memory, unless there is to be none at all."""
    worker = start("report(sys.argv[1:])", threads=3, pinned_bytes=pinned_bytes, gpu_memory_bytes=2**27)
    device, threads, heartbeat_s, _, _, _, *numbers = report_of(worker)
    assert (device, threads, heartbeat_s) == ("cuda:0", "3", "0.25")
    pinned_nbytes = pinned_bytes + arena.reserve_nbytes if pinned_bytes else 0
    assert [int(number) for number in numbers[:4]] == [arena.file_nbytes, pinned_nbytes, 2**27, os.getpid()]


@pytest.mark.parametrize(("ours", "theirs"), [(None, "passive"), ("active", "active")])
def test_threads_of_a_worker_do_not_spin_unless_they_are_to(
    start: Start, monkeypatch: pytest.MonkeyPatch, ours: str | None, theirs: str
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if ours is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", ours)
    assert report_of(start("report(os.environ['OMP_WAIT_POLICY'])")) == theirs


def test_what_a_worker_prints_is_no_output_of_the_server(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    assert has_ended(start("print('loading a library')"))
    assert capfd.readouterr() == ("", "loading a library\n")


def test_a_worker_is_silent_until_it_reports_or_ends(start: Start) -> None:
    worker = start(ENDS_WITH_ITS_SLOTS + "; report('ended')")
    assert worker.receive_report(0.01) is None
    worker.shut_down()
    assert report_of(worker) == "ended"
    assert has_ended(worker)


def test_a_worker_sends_heartbeats_while_it_starts(start: Start) -> None:
    """Else one that compiles a kernel for minutes would be taken for one that hangs."""
    worker = start(LOADS_A_LIBRARY)
    assert [worker.receive_report(TIMEOUT_S) for _ in range(3)] == [Report.HEARTBEAT + b"0"] * 3


def test_the_memory_of_a_worker_is_known_until_it_has_ended(start: Start) -> None:
    worker = start("report(os.getpid()); " + SLEEPS)
    pid = report_of(worker)
    assert worker.resident_bytes == pytest.approx(psutil.Process(pid).memory_info().rss, rel=0.2)
    worker.kill()
    assert has_ended(worker)
    assert worker.resident_bytes == 0
    worker.close()
    assert worker.resident_bytes == 0


@pytest.mark.parametrize(
    ("program", "ending"),
    [
        (ENDS_WITH_ITS_SLOTS, "ended with exit code 0"),
        ("sys.exit(3)", "ended with exit code 3"),
        ("os.kill(os.getpid(), signal.SIGABRT)", "was killed by SIGABRT"),
    ],
)
def test_a_worker_that_is_closed_ends_and_it_is_said_how(start: Start, program: str, ending: str) -> None:
    assert start(program, slots=2).close() == ending


def test_a_worker_that_does_not_end_is_killed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_EXIT_TIMEOUT_S", 0.1)
    assert start(SLEEPS).close() == "was killed by SIGKILL"


def test_a_worker_that_is_stopped_can_be_killed(start: Start) -> None:
    worker = start(STOPS)
    assert report_of(worker) == "stops"
    worker.kill()
    assert has_ended(worker)


@pytest.mark.parametrize(("device", "is_late"), [("cpu", False), ("cuda:0", True)])
def test_any_late_slot_makes_a_worker_late_but_a_cpus_has_to_compile_at_first(
    start: Start, monkeypatch: pytest.MonkeyPatch, device: str, is_late: bool
) -> None:
    monkeypatch.setattr("bngrad_server.workers.worker_slot._BATCH_TIMEOUT_S", -1.0)
    worker = start(SLEEPS, device, slots=2)
    worker.begin([(job(), range(SPEC.channels))])
    assert worker.is_late is is_late


def test_every_slot_is_told_of_regions_also_of_those_for_which_there_was_no_room(start: Start) -> None:
    count = 1000  # far more than a socket has room for
    worker = start(COUNTS_CHANGES, slots=2)
    for number in range(count):
        worker.change_region(number, Region(number, b"", REGION_FD, 1, ""))
    worker.change_ahead(AheadChange(1))
    first = report_of(worker)
    worker.flush_pending()
    worker.change_ahead(AheadChange(1))
    assert all(after > before > 0 for before, after in zip(first, report_of(worker), strict=True))


def test_a_worker_that_reads_nothing_has_no_copy_for_which_there_was_no_room(start: Start) -> None:
    worker = start(SLEEPS)
    count = 10_000  # far more than a socket has room for
    for number in range(1, count):
        worker.change_ahead(AheadChange(number, nbytes=1))
    assert (worker.has_copy(1), worker.has_copy(count - 1)) == (True, False)
    worker.change_ahead(AheadChange(1))
    assert not worker.has_copy(1)
