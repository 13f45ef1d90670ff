"""Executors when the system refuses a new thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import pytest

from bngrad_server.runtime.executors import HandlerExecutor, OnDemandExecutor

_TOO_LARGE = 1 << 47
"""A size of stack beyond what a process can address."""


def test_an_action_without_a_thread_is_refused() -> None:
    threads, answers = OnDemandExecutor("test"), [Future[int](), Future[int](), Future[int]()]
    with no_more_threads(), pytest.raises(RuntimeError, match="can't start new thread"):
        threads.submit(lambda: answers[0].set_result(0))
    threads.submit(lambda: answers[1].set_result(1))
    assert answers[1].result(20) == 1
    threads.submit(lambda: answers[2].set_result(2))
    assert answers[2].result(20) == 2
    threads.shutdown()
    assert not answers[0].done()


def test_a_call_without_a_thread_waits_for_one_of_the_pool() -> None:
    first_may_end, second = threading.Event(), Future[int]()
    with HandlerExecutor(2, "test") as threads:
        first = threads.submit(first_may_end.wait, 20)
        with no_more_threads():
            threads.submit(second.set_result, 2)
        assert not second.done()
        first_may_end.set()
        assert first.result(20)
        assert second.result(20) == 2


@contextmanager
def no_more_threads() -> Iterator[None]:
    usual = threading.stack_size(_TOO_LARGE)
    try:
        yield
    finally:
        threading.stack_size(usual)
