"""The HTTP process, as its supervisor keeps it, and what it says of the front process."""

from __future__ import annotations

import json
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.servers import children_of, wait_until

from bngrad_server.monitor.supervisor import MonitorSupervisor
from bngrad_server.telemetry.metrics import Metrics

STATUS: dict[str, Any] = {
    **Metrics().status(), "time": 1.0, "ready": True, "stopping": False, "queue": {"requests": 0}, "in_flight": 0,
    "event_loop_busy_s": 0.0, "devices": [], "batches": {"sizes": [], "requests": 0}, "failures": [],
}  # fmt: skip


@contextmanager
def supervised(status: Callable[[], dict[str, Any]]) -> Iterator[str]:
    """Runs an HTTP process, and gives its URL."""
    supervisor = MonitorSupervisor("127.0.0.1:0", "", status)
    supervisor.start()
    try:
        yield f"http://{supervisor.address}"
    finally:
        supervisor.close()
    assert not children_of(os.getpid(), "bngrad_server.monitor")
    assert not any(thread.name == "monitor" for thread in threading.enumerate())


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:  # noqa: S310 - our own
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError:
        return 0, ""


def test_the_process_is_started_again_after_a_status_that_failed(caplog: pytest.LogCaptureFixture) -> None:
    errors = [MemoryError("for a test")]

    def status() -> dict[str, Any]:
        if errors:
            raise errors.pop()
        return STATUS

    with supervised(status) as url:
        wait_until(lambda: get(f"{url}/readyz") == (200, "ok\n"))
        assert json.loads(get(f"{url}/status.json")[1])["server"] == STATUS
    assert [record.getMessage() for record in caplog.records] == ["the HTTP process failed and is started again"]


@pytest.mark.parametrize(
    ("state", "answer"),
    [
        ({"ready": True}, (200, "ok\n")),
        ({"ready": False}, (503, "no worker is ready\n")),
        ({"ready": False, "stopping": True}, (503, "the server is stopping\n")),
    ],
)
def test_readiness_is_that_of_the_front_process(state: dict[str, bool], answer: tuple[int, str]) -> None:
    with supervised(lambda: STATUS | state) as url:
        wait_until(lambda: get(f"{url}/healthz") == (200, "ok\n"))
        assert get(f"{url}/readyz") == answer
        assert get(f"{url}/nowhere") == (404, "there are / and /metrics, /healthz, /readyz, /status.json\n")


def test_the_longest_failures_that_clients_can_cause_fit_a_packet() -> None:
    device = {"name": "cpu:255", "description": "d" * 200, "state": "ready", "restarts": 0, "memory_bytes": 0}
    longest = {
        "code": "INVALID_ARGUMENT",
        "op": "o" * 30,
        "client": "c" * 100,
        "message": "\N{GRINNING FACE}" * 299 + "\ud800",
    }
    status = STATUS | {"devices": [device] * 256, "failures": [longest] * 50}
    with supervised(lambda: status) as url:
        wait_until(lambda: get(f"{url}/readyz") == (200, "ok\n"))
        assert json.loads(get(f"{url}/status.json")[1])["server"] == status
