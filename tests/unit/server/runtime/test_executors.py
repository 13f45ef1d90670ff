"""The threads of executors: how many there are, and what happens when the system refuses a new one."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest
from tests.servers import wait_until

from bngrad_server.runtime import executors
from bngrad_server.runtime.executors import OnDemandExecutor

_TOO_LARGE = 1 << 47
"""A size of stack beyond what a process can address."""


class Threads(OnDemandExecutor):
    """Threads that a block ends, and whose calls have results."""

    def __enter__(self) -> Threads:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def call(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        done = Future[Any]()
        self.submit(lambda: done.set_result(function(*arguments)))
        return done


def test_a_call_without_a_thread_waits_for_one_of_the_pool() -> None:
    first_may_end, second = threading.Event(), Future[int]()
    with Threads("test") as threads:
        with no_more_threads():
            first = threads.call(first_may_end.wait, 20)
            threads.call(second.set_result, 2)
            time.sleep(0.1)
        assert not second.done()
        first_may_end.set()
        assert first.result(20)
        assert second.result(20) == 2
        burst(threads, 2)  # now it has more


def test_a_call_does_not_wait_until_a_thread_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = threading.Thread.start
    starting, may_start = threading.Event(), threading.Event()

    def start_late(thread: threading.Thread) -> None:
        if thread.name == "test":
            starting.set()
            may_start.wait(20)
        begin(thread)

    threads, answers = OnDemandExecutor("test"), [Future[int](), Future[int]()]
    monkeypatch.setattr(threading.Thread, "start", start_late)
    threads.submit(lambda: answers[0].set_result(0))
    assert starting.wait(20)
    threads.submit(lambda: answers[1].set_result(1))
    assert not any(answer.done() for answer in answers)
    may_start.set()
    assert [answer.result(20) for answer in answers] == [0, 1]
    threads.shutdown()


def burst(threads: Threads, count: int) -> None:
    """Makes ``count`` calls at once, each in a thread of its own."""
    together = threading.Barrier(count)
    for each in [threads.call(together.wait, 20) for _ in range(count)]:
        each.result(20)


def count() -> int:
    return sum(thread.name == "test" for thread in threading.enumerate())


def test_the_threads_of_a_burst_end_but_for_one() -> None:
    with Threads("test") as threads:
        burst(threads, 8)
        wait_until(lambda: count() == 1)
        burst(threads, 8)
    assert count() == 0


def test_the_threads_of_a_burst_end_while_single_calls_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "_IDLE_S", 0.2)
    with Threads("test") as threads:
        burst(threads, 20)
        wait_until(lambda: threads.call(count).result(20) == 2)  # that of the call, and one for the next


_WITHOUT_MEMORY = """
import resource, threading
from bngrad_server.runtime.executors import OnDemandExecutor

threads = OnDemandExecutor("test")
done = threading.Semaphore(0)
with open("/proc/self/statm") as statm:
    used = int(statm.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + spare, resource.RLIM_INFINITY))
for _ in range(3):
    threads.submit(done.release)
print(all([done.acquire(timeout=20) for _ in range(3)]), sum(each.name == "test" for each in threading.enumerate()))
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
together = threading.Barrier(3)
for _ in range(2):
    threads.submit(together.wait)
together.wait(20)
print("more threads")
"""


@pytest.mark.parametrize("spare_mib", [0, 1, 9])
def test_where_memory_is_lacking_for_a_thread_calls_run_in_the_one_that_there_is(spare_mib: int) -> None:
    """Of a thread that ended before Python knew of it, the start was awaited for ever."""
    script = f"spare = {spare_mib} * 2**20\n{_WITHOUT_MEMORY}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "True 1\nmore threads\n", done.stderr


def test_an_idle_thread_keeps_nothing_of_its_last_call() -> None:
    with Threads("test") as threads:
        message = threading.Event()  # any object
        threads.call(message.set).result(20)
        reference = weakref.ref(message)
        del message
        wait_until(lambda: reference() is None)


@contextmanager
def no_more_threads() -> Iterator[None]:
    usual = threading.stack_size(_TOO_LARGE)
    try:
        yield
    finally:
        threading.stack_size(usual)
