"""The load that a server measures."""

from __future__ import annotations

import socket

import hpack
import pytest
from tests.clock import Clock

from bngrad_server.runtime.event_loop import EventLoop
from bngrad_server.scheduling.admission import Admission
from bngrad_server.scheduling.batch import BatchCounts
from bngrad_server.telemetry import load
from bngrad_server.telemetry.load import LoadListener, LoadMeter, LoadTrailers
from bngrad_wire.load_report import LoadReport, parse


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(load, "time", made)
    return made


def report_of(meter: LoadMeter) -> LoadReport:
    report = parse(dict(hpack.Decoder().decode(meter.trailers().block, raw=True))[b"endpoint-load-metrics"].decode())
    assert report is not None
    return report


def test_rate_and_utilization_are_those_of_the_last_seconds(clock: Clock) -> None:
    counts, admission = BatchCounts(), Admission(100, 10.0)
    meter = LoadMeter(counts, admission, lambda: 2)
    admission.admitted = 3
    meter.trailers()
    for _ in range(100):
        clock.now += 0.21
        counts.ended += 21
        counts.busy_s += 0.21
        meter.trailers()
    report = report_of(meter)
    assert report.rate == pytest.approx(100, rel=0.5)
    assert report.utilization == pytest.approx(0.5, rel=0.5)
    assert report.capacity == pytest.approx(200, rel=0.01)
    assert report.requests == 3


@pytest.mark.parametrize("slots", [1, 4])
def test_more_workers_do_not_make_the_front_process_seem_faster(clock: Clock, slots: int) -> None:
    counts = BatchCounts()
    meter = LoadMeter(counts, Admission(100, 10.0), lambda: slots)
    meter.trailers()
    clock.now += 0.3
    counts.ended, counts.busy_s, counts.front_busy_s = 30, 0.1, 0.1
    assert report_of(meter).capacity == pytest.approx(300, rel=0.01)


def test_requests_that_the_front_process_computes_are_in_the_server_too(clock: Clock) -> None:
    meter = LoadMeter(counts := BatchCounts(), Admission(100, 10.0), lambda: 1)
    meter.trailers()
    counts.ended, counts.busy_s = 1, 0.1
    ends = [socket.socketpair() for _ in range(3)]
    meter.event_loop = event_loop = EventLoop("never started")
    for near, far in ends:
        event_loop.add_reader(near.fileno(), lambda: None)
        far.send(b"unread")
    assert meter.unread_connections == 3
    clock.now += 0.3
    assert report_of(meter).requests == 1 + 3  # the one that is answered has been read
    for near, far in ends:
        event_loop.remove_reader(near.fileno())
        near.close()
        far.close()
    assert meter.unread_connections == 0


def test_the_capacity_outlasts_a_pause(clock: Clock) -> None:
    counts = BatchCounts()
    meter = LoadMeter(counts, Admission(100, 10.0), lambda: 1)
    meter.trailers()
    clock.now += 0.3
    counts.ended, counts.busy_s = 10, 0.1
    meter.trailers()
    clock.now += 20
    meter.trailers()  # not measured at once: one request tells little
    clock.now += 0.3
    report = report_of(meter)
    assert report.rate < 0.1
    assert report.capacity == pytest.approx(100, rel=0.01)


def test_nothing_is_reported_before_a_request_was_measured(clock: Clock) -> None:
    """A rate of zero is an error to Envoy, which logs it."""
    counts = BatchCounts()
    meter = LoadMeter(counts, Admission(100, 10.0), lambda: 1)
    for _ in range(3):
        clock.now += 0.3
        assert not meter.trailers().block
    clock.now += 0.3
    counts.ended, counts.busy_s = 1, 0.1
    assert meter.trailers().block


def test_a_report_lasts_for_a_while(clock: Clock) -> None:
    meter = LoadMeter(BatchCounts(), Admission(100, 10.0), lambda: 0)
    first = meter.trailers()
    clock.now += 0.01
    assert meter.trailers() is first
    clock.now += 0.3
    assert meter.trailers() is not first


def test_a_connection_needs_each_report_once() -> None:
    first, second = LoadTrailers(LoadReport(1.0, 0.5, 1.0)), LoadTrailers(LoadReport(1.0, 0.5, 1.0))
    listener = LoadListener()
    assert [listener.needs(report) for report in (*[first] * 100, second, second)] == [True, *[False] * 99, True, False]
