"""The threads of the asynchronous client's calls."""

from __future__ import annotations

import threading
import time

import pytest

from bngrad._executor import DaemonExecutor

TIMEOUT_S = 20.0


def fail(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_calls_that_waited_for_a_thread_keep_no_later_ones_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = DaemonExecutor(8, "test")
    gate, later_gate = threading.Event(), threading.Event()
    first = executor.submit(gate.wait, TIMEOUT_S)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        waiting = [executor.submit(time.monotonic) for _ in range(3)]
    gate.set()
    assert first.result(TIMEOUT_S)
    for future in waiting:
        future.result(TIMEOUT_S)
    held = executor.submit(later_gate.wait, TIMEOUT_S)
    try:
        assert [executor.submit(int, text).result(TIMEOUT_S / 4) for text in "123"] == [1, 2, 3]
    finally:
        later_gate.set()
        executor.shutdown()
    assert held.result(TIMEOUT_S)


def test_a_call_for_which_the_first_thread_cannot_be_started_is_never_run(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = DaemonExecutor(8, "test")
    calls: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            executor.submit(calls.append, 1)
    executor.submit(calls.append, 2).result(TIMEOUT_S)
    executor.shutdown()
    assert calls == [2]


def test_more_calls_than_threads_are_all_run_by_no_more_than_these() -> None:
    executor = DaemonExecutor(4, "test-many")
    gate = threading.Event()
    futures = [executor.submit(gate.wait, TIMEOUT_S) for _ in range(20)]
    assert sum(thread.name == "test-many" for thread in threading.enumerate()) == 4
    gate.set()
    assert all(future.result(TIMEOUT_S) for future in futures)
    executor.shutdown()
