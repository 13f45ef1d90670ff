"""The event loop: how it shares its time out, and how little of a core a limited one uses."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from functools import partial

import pytest
from tests.servers import wait_until

from bngrad_server.runtime.event_loop import EventLoop

_SHARE = 0.05
_CALLBACK_S = 0.002
_WITHOUT_MEMORY = """
import _testcapi, threading, time
from bngrad_server.runtime.event_loop import EventLoop

def starve():
    _testcapi.set_nomemory(number, number + 1)
    begun[0] = number  # allocates nothing

begun = [-1]
loop = EventLoop("starved")
loop.start()
for number in range(100):
    loop.call_soon(starve)
    while begun[0] < number:
        time.sleep(0.001)
    time.sleep(0.005)
    _testcapi.remove_mem_hooks()
    done = threading.Event()
    loop.call_soon(done.set)
    assert done.wait(10), number
"""


def test_a_limited_loop_computes_for_its_share_of_a_core() -> None:
    loop = EventLoop("limited", _SHARE)
    count = 0

    def compute() -> None:
        nonlocal count
        count += 1
        until = time.thread_time() + _CALLBACK_S
        while time.thread_time() < until:
            pass
        loop.call_soon(compute)

    began = time.monotonic()
    loop.call_soon(compute)
    loop.start()
    time.sleep(1.5)
    loop.stop(20)
    elapsed_s = time.monotonic() - began
    assert not loop.is_alive
    assert 0 < count * _CALLBACK_S < 1.5 * _SHARE * elapsed_s + 0.1


def test_callbacks_that_call_themselves_again_leave_room_for_events_and_ticks() -> None:
    loop = EventLoop("busy")
    ticks = 0

    def tick() -> None:
        nonlocal ticks
        ticks += 1

    def again() -> None:
        loop.call_soon(again)

    loop.on_tick = tick
    for _ in range(500):
        loop.call_soon(again)
    loop.start()
    give_up = time.monotonic() + 20
    while ticks < 3 and time.monotonic() < give_up:
        time.sleep(0.01)
    loop.stop(20)
    assert ticks >= 3


def test_what_is_brief_waits_for_one_long_callback_at_most() -> None:
    loop = EventLoop("busy")
    order: list[str] = []
    pipes = {name: os.pipe() for name in ("long 1", "brief", "long 2", "late", "long 3", "brief again")}

    def on_readable(name: str) -> None:
        os.read(pipes[name][0], 1)
        order.append(name)
        if name == "long 1":
            os.write(pipes["late"][1], b"x")

    for name, (reader, writer) in pipes.items():
        loop.add_reader(reader, partial(on_readable, name))
        if name != "brief":
            loop.expect_long(reader, "one owner")
        if name in {"late", "brief again"}:
            loop.expect_brief(reader)
        if name != "late":
            os.write(writer, b"x")
    assert loop.count_ready() == 5
    loop.start()
    wait_until(lambda: len(order) == len(pipes))
    for reader, _ in pipes.values():
        loop.remove_reader(reader)
    loop.stop(20)
    for descriptor in itertools.chain(*pipes.values()):
        os.close(descriptor)
    assert order == ["brief", "brief again", "long 1", "late", "long 2", "long 3"]


def test_callbacks_in_the_background_wait_for_those_that_come_later() -> None:
    loop = EventLoop("busy")
    order: list[str] = []
    for number in range(3):
        loop.call_in_background(partial(order.append, f"background {number}"))
    loop.call_in_background(partial(loop.call_soon, partial(order.append, "soon")))
    loop.call_in_background(partial(order.append, "last"))
    loop.start()
    loop.stop(20)
    assert order == ["background 0", "background 1", "background 2", "soon", "last"]


def test_it_is_busy_while_callbacks_run_and_not_while_it_waits() -> None:
    loop = EventLoop("counted")
    loop.start()
    time.sleep(0.5)
    idle_s = loop.busy_s
    assert idle_s < 0.4
    has_slept = threading.Event()
    began = time.monotonic()
    loop.call_soon(partial(time.sleep, 0.5))
    loop.call_soon(has_slept.set)
    assert has_slept.wait(20)
    loop.stop(20)
    assert 0.4 < loop.busy_s - idle_s <= time.monotonic() - began
    assert loop.count_ready() == 0


def test_it_goes_on_after_its_callback_after_events_has_failed() -> None:
    loop = EventLoop("failing")
    reader, writer = os.pipe()
    is_read = threading.Event()
    failures = 0

    def fail() -> float:
        nonlocal failures
        failures += 1
        raise MemoryError

    def read() -> None:
        loop.remove_priority_reader(reader)
        is_read.set()

    loop.after_events = fail
    loop.add_priority_reader(reader, read)
    loop.start()
    wait_until(lambda: failures >= 3)
    os.write(writer, b"x")
    assert is_read.wait(20)
    loop.after_events = lambda: float("inf")
    loop.stop(20)
    assert not loop.is_alive
    os.close(reader)
    os.close(writer)


def test_another_thread_counts_the_descriptors_that_wait_for_the_loop() -> None:
    loop = EventLoop("blocked")
    pipes = [os.pipe() for _ in range(40)]
    is_blocked, go_on = threading.Event(), threading.Event()
    served: list[int] = []

    def serve(fd: int) -> None:
        loop.remove_reader(fd)
        served.append(fd)

    def block() -> None:
        is_blocked.set()
        go_on.wait(20)

    for reader, _ in pipes:
        loop.add_reader(reader, partial(serve, reader))
    loop.start()
    loop.call_soon(block)
    assert is_blocked.wait(20)
    assert loop.count_ready() == 0
    for _, writer in pipes[:35]:
        os.write(writer, b"x")
    loop.call_soon(block)  # its waker does not count
    assert [loop.count_ready() for _ in range(3)] == [35] * 3
    go_on.set()
    wait_until(lambda: len(served) == 35)
    loop.stop(20)
    assert sorted(served) == sorted(reader for reader, _ in pipes[:35])
    for fd in itertools.chain(*pipes):
        os.close(fd)


def test_a_limited_loop_saves_little_up_while_it_is_idle() -> None:
    loop = EventLoop("limited", _SHARE)
    count = 0
    has_ended = threading.Event()

    def compute() -> None:
        nonlocal count
        count += 1
        until = time.thread_time() + _CALLBACK_S
        while time.thread_time() < until:
            pass
        if count < 10:
            loop.call_soon(compute)
        else:
            has_ended.set()

    loop.start()
    time.sleep(1)
    began = time.monotonic()
    loop.call_soon(compute)
    assert has_ended.wait(20)
    assert time.monotonic() - began > 0.2
    loop.stop(20)


def test_a_loop_survives_without_memory() -> None:
    """Each of its next 100 allocations fails once."""
    pytest.importorskip("_testcapi")
    subprocess.run([sys.executable, "-c", _WITHOUT_MEMORY], check=True, timeout=60)


def test_the_number_of_a_removed_descriptor_can_be_used_again() -> None:
    loop = EventLoop("test")
    fd = os.eventfd(0)
    for _ in range(2):
        loop.add_reader(fd, lambda: None)
        loop.expect_brief(fd)
        loop.expect_long(fd, "owner")
        loop.remove_reader(fd)
    os.close(fd)


def test_a_descriptor_whose_end_is_awaited_is_not_read_before() -> None:
    (near, far), loop, ended = socket.socketpair(), EventLoop("test"), threading.Event()

    def end() -> None:
        loop.remove_reader(near.fileno())
        ended.set()

    with near, far:
        loop.await_end(near.fileno(), end)
        loop.start()
        far.sendall(b"unread")
        assert not ended.wait(0.2)
        far.shutdown(socket.SHUT_WR)
        assert ended.wait(20)
        loop.stop(20)
        assert near.recv(16) == b"unread"


def test_a_limited_loop_has_turns_for_all_although_many_come_before_others() -> None:
    loop, counts = EventLoop("limited", 0.5), Counter[int]()
    ready, other = [os.eventfd(1) for _ in range(8)], os.eventfd(1)
    for fd in ready:
        loop.add_priority_reader(fd, partial(counts.update, [fd]))
    loop.add_reader(other, partial(counts.update, [other]))
    loop.start()
    wait_until(lambda: all(counts[fd] > 2 for fd in (*ready, other)))
    assert sum(counts[fd] for fd in ready) > counts[other]
    loop.stop(20)
    for fd in (*ready, other):
        os.close(fd)


def test_a_callback_may_remove_another_one_that_comes_before_others() -> None:
    loop, ran = EventLoop("test"), list[int]()
    ready = {os.eventfd(1) for _ in range(2)}

    def remove_all(fd: int) -> None:
        ran.append(fd)
        for each in ready:
            loop.remove_priority_reader(each)

    for fd in ready:
        loop.add_priority_reader(fd, partial(remove_all, fd))
    loop.start()
    wait_until(lambda: bool(ran))
    done = threading.Event()
    loop.call_soon(done.set)
    assert done.wait(20)
    assert len(ran) == 1
    loop.stop(20)
    for fd in ready:
        os.close(fd)
