"""The rates and times that the dashboard shows, of counters that grow."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from bngrad_server.codec.ops import OPS
from bngrad_server.monitor.history import History
from bngrad_server.telemetry.metrics import STAGES, Metrics


class Server:
    """A server's status at a time, as far as the history reads it."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.now = 1000.0
        self.busy_s = self.event_loop_busy_s = 0.0

    def answer(self, count: int) -> None:
        for _ in range(count):
            self.metrics.answered(0, 10, (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0))

    @property
    def status(self) -> dict[str, Any]:
        sizes = [sum(count for *_, count in self.metrics.status()["requests"]), 0]
        return {
            **self.metrics.status(),
            "time": self.now,
            "queue": {"requests": sizes[0]},
            "in_flight": 4,
            "event_loop_busy_s": self.event_loop_busy_s,
            "devices": [{"name": "cpu:0", "busy_s": self.busy_s}],
            "batches": {"sizes": sizes, "requests": 2 * sizes[0]},
        }


def test_a_sample_does_not_keep_the_failures() -> None:
    class Failures(list[str]):
        """A list that can be referred to weakly."""

    history, failures = History(), Failures()
    history.add({**Server().status, "failures": failures})
    kept = weakref.ref(failures)
    del failures
    assert kept() is None


def test_a_point_has_the_changes_of_its_second_and_the_queue_at_its_end() -> None:
    server, history = Server(), History()
    server.answer(5)
    history.add(server.status)
    assert history.status() == {"points": [], "recent": None}
    server.answer(6)
    server.metrics.failed(OPS[0].name, "unary", "INTERNAL")
    server.busy_s, server.event_loop_busy_s, server.now = 1.0, 9.0, 1002.0
    history.add(server.status)
    (point,) = history.status()["points"]
    assert {name: point[name] for name in ("time", "answered", "failed", "bytes", "queue", "in_flight")} == {
        "time": 1002.0, "answered": 3.0, "failed": 0.5, "bytes": 30.0, "queue": 12, "in_flight": 4,
    }  # fmt: skip
    assert point["busy"] == {"front": 1.0, "cpu:0": 0.5}  # no thread is busier than all the time
    assert 4.0 < point["p50"] < point["p99"] < 9.0


def test_the_last_minute_is_one_and_leaves_out_what_was_before() -> None:
    server, history = Server(), History()
    for _ in range(100):
        history.add(server.status)
        server.answer(2)
        server.now += 1.0
    history.add(server.status)
    recent = history.status()["recent"]
    assert (recent["seconds"], recent["answered"], recent["failed"], sum(recent["counts"])) == (60.0, 120, 0, 120)
    assert recent["stages"] == pytest.approx(dict.fromkeys(STAGES, 1.0) | {"wait": 2.0})
    assert recent["batch_requests"] == 2.0


def test_a_status_that_is_given_again_adds_no_point() -> None:
    server, history = Server(), History()
    for _ in range(2):
        history.add(server.status)
    assert history.status()["points"] == []


def test_the_history_begins_anew_when_the_clock_is_set_back() -> None:
    server, history = Server(), History()
    for now in (1000.0, 1001.0, 1.0, 2.0):
        server.now = now
        history.add(server.status)
    status = history.status()
    assert [point["time"] for point in status["points"]] == [2.0]
    assert status["recent"]["seconds"] == 1.0
