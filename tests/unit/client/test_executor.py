"""The threads of the asynchronous client's calls."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import threading
import time
import weakref
from functools import partial
from typing import Any

import pytest
from tests.servers import wait_until
from tests.unit.client.calls import interrupt_at

from bngrad._executor import DaemonExecutor

TIMEOUT_S = 20.0


def is_gone(reference: weakref.ref[Any]) -> bool:
    return reference() is None


def threads_named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


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


def test_after_an_interrupt_at_any_step_later_calls_have_all_threads() -> None:
    for step in itertools.count():
        executor, together = DaemonExecutor(2, "test"), threading.Barrier(2)
        is_over = not interrupt_at(step, partial(executor.submit, int))
        for future in [executor.submit(together.wait, TIMEOUT_S) for _ in range(2)]:
            future.result(TIMEOUT_S)
        executor.shutdown()
        if is_over:
            break
    assert step > 5


def test_who_submits_many_calls_waits_for_the_start_of_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads start the others: an event loop that begins many calls goes on meanwhile."""
    started_by: list[str] = []
    start = threading.Thread.start

    def note_and_start(thread: threading.Thread) -> None:
        started_by.append(threading.current_thread().name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", note_and_start)
    executor, gate = DaemonExecutor(16, "test-start"), threading.Barrier(17)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(TIMEOUT_S)  # no thread runs before the calls are submitted
    try:
        futures = [executor.submit(gate.wait, TIMEOUT_S) for _ in range(16)]
    finally:
        sys.setswitchinterval(interval)
    gate.wait(TIMEOUT_S)
    for future in futures:
        future.result(TIMEOUT_S)
    executor.shutdown()
    assert started_by == [threading.current_thread().name] + ["test-start"] * 15


def test_more_calls_than_threads_are_all_run_by_no_more_than_these() -> None:
    executor = DaemonExecutor(4, "test-many")
    gate = threading.Event()
    futures = [executor.submit(gate.wait, TIMEOUT_S) for _ in range(20)]
    wait_until(lambda: len(threads_named("test-many")) == 4)
    gate.set()
    assert all(future.result(TIMEOUT_S) for future in futures)
    executor.shutdown()


@pytest.mark.parametrize("is_shut_down", [True, False], ids=["shut down", "forgotten"])
def test_all_threads_end_with_the_executor(is_shut_down: bool) -> None:
    executor, gate = DaemonExecutor(4, "test-end"), threading.Event()
    futures = [executor.submit(gate.wait, TIMEOUT_S) for _ in range(4)]
    wait_until(lambda: len(threads_named("test-end")) == 4)
    threads = threads_named("test-end")
    if is_shut_down:
        executor.shutdown()
        with pytest.raises(RuntimeError, match="was shut down"):
            executor.submit(int)
    del executor
    gate.set()
    for future, thread in zip(futures, threads, strict=True):
        assert future.result(TIMEOUT_S)
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


def test_a_thread_that_waits_makes_the_next_call_and_keeps_nothing_of_the_last() -> None:
    executor = DaemonExecutor(64, "test-idle")
    for _ in range(20):
        argument = threading.Event()
        gone = weakref.ref(argument)
        assert not executor.submit(argument.is_set).result(TIMEOUT_S)
        del argument
        wait_until(partial(is_gone, gone))
        time.sleep(0.01)  # the thread is idle soon, but not at once
    assert len(threads_named("test-idle")) < 10
    executor.shutdown()


def test_what_ends_a_thread_ends_only_the_call() -> None:
    executor = DaemonExecutor(1, "test")
    with pytest.raises(SystemExit):
        executor.submit(sys.exit).result(TIMEOUT_S)
    assert executor.submit(int).result(TIMEOUT_S) == 0
    executor.shutdown()


def test_an_error_refers_to_no_future() -> None:
    executor = DaemonExecutor(1, "test")
    gc.disable()
    try:
        future = executor.submit(int, "x")
        with pytest.raises(ValueError, match="invalid literal"):
            future.result(TIMEOUT_S)
        gone = weakref.ref(future)
        del future
        wait_until(lambda: gone() is None)
    finally:
        gc.enable()
        executor.shutdown()


def test_the_interpreter_waits_for_no_call_at_exit() -> None:
    code = "import time; from bngrad._executor import DaemonExecutor as E; e = E(1, ''); e.submit(time.sleep, 60)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=TIMEOUT_S)
