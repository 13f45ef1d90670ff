"""How calls wait for their turn."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import pytest
from tests.clock import Clock
from tests.servers import wait_until
from tests.unit.client.calls import interrupt_at

from bngrad import _deadline as deadline_module
from bngrad._deadline import ENDLESS, Cancellation, Deadline
from bngrad._transports import turns as turns_module
from bngrad._transports.turns import NoTurnError, Turns

SECONDS = 30.0
SHORT_S = 0.002


@contextmanager
def turn(turns: Turns, deadline: Deadline = ENDLESS, cancellation: Cancellation | None = None) -> Iterator[None]:
    taken = turns.take(deadline, cancellation or Cancellation())
    try:
        yield
    finally:
        turns.give_back(taken)


class Calls:
    """Calls, each in a thread, that have one turn at a time, or more."""

    def __init__(self, count: int = 1) -> None:
        self.order: list[str] = []
        self.turns = Turns(count)
        self._threads = ThreadPoolExecutor(8)

    def wait(self, name: str, deadline: Deadline = ENDLESS, cancellation: Cancellation | None = None) -> Future[None]:
        """Begins a call; returns once it waits or has ended."""
        before = self.turns.waiting
        call = self._threads.submit(self.run, name, deadline, cancellation or Cancellation())
        wait_until(lambda: self.turns.waiting > before or call.done())
        return call

    def run(self, name: str, deadline: Deadline, cancellation: Cancellation) -> None:
        with turn(self.turns, deadline, cancellation):
            self.order.append(name)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    monkeypatch.setattr(turns_module, "_LOOK_S", 3600.0)  # calls must be woken
    return Calls()


def test_calls_have_their_turns_in_the_order_in_which_they_came(calls: Calls) -> None:
    with turn(calls.turns):
        waiting = [calls.wait(name) for name in "abcd"]
        assert not calls.order
    for each in waiting:
        each.result(SECONDS)
    assert calls.order == list("abcd")


@pytest.mark.parametrize("ended", range(3))
def test_the_end_of_any_call_wakes_the_one_that_waits(monkeypatch: pytest.MonkeyPatch, ended: int) -> None:
    monkeypatch.setattr(turns_module, "_LOOK_S", 3600.0)
    calls = Calls(3)
    running = [calls.turns.take(ENDLESS, Cancellation()) for _ in range(3)]
    waiting = calls.wait("a")
    calls.turns.give_back(running[ended])
    waiting.result(SECONDS)


def test_a_call_waits_for_half_of_its_time_and_takes_no_turn_afterwards(calls: Calls) -> None:
    with turn(calls.turns):
        hopeless, patient = calls.wait("a", Deadline.after(1)), calls.wait("b", Deadline.after(SECONDS))
        with pytest.raises(NoTurnError):
            hopeless.result(SECONDS)
    patient.result(SECONDS)
    assert calls.order == ["b"]


def test_a_call_that_had_no_turn_has_half_of_its_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    clock.tick_s = 0.1
    monkeypatch.setattr(deadline_module, "time", clock)
    monkeypatch.setattr(turns_module, "_LOOK_S", 1e-4)
    turns = Turns(1)
    taken = turns.take(ENDLESS, Cancellation())
    deadline = Deadline.after(10.0)
    with pytest.raises(NoTurnError):
        turns.take(deadline, Cancellation())
    assert 4.0 < (deadline.remaining_s() or 0) < 5.0
    turns.give_back(taken)


def test_a_cancellation_ends_the_wait(calls: Calls) -> None:
    cancellation = Cancellation()
    with turn(calls.turns):
        waiting = calls.wait("a", cancellation=cancellation)
        cancellation.cancel()
        with pytest.raises(NoTurnError):
            waiting.result(SECONDS)
    calls.wait("b").result(SECONDS)
    assert calls.order == ["b"]


def test_an_interrupt_ends_the_wait_and_takes_no_turn(calls: Calls) -> None:
    class Interrupted(Cancellation):
        def attach(self, callback: object) -> None:
            raise KeyboardInterrupt

    with turn(calls.turns), pytest.raises(KeyboardInterrupt):
        calls.run("a", ENDLESS, Interrupted())
    calls.wait("b").result(SECONDS)
    assert calls.order == ["b"]


@pytest.mark.parametrize("others", [0, 1, 2], ids="{} others".format)
def test_no_turn_is_lost_by_an_interrupt_at_any_step(others: int) -> None:
    for step in itertools.count():
        turns = Turns(2)
        with ExitStack() as running:
            for _ in range(others):
                running.enter_context(turn(turns))
            is_over = not interrupt_at(step, lambda: call_soon(turns))  # noqa: B023 - it is called here
        with turn(turns, Deadline.after(SHORT_S)), turn(turns, Deadline.after(SHORT_S)):
            assert turns.waiting == 0
        if is_over:
            break
    assert step > 5


def test_a_call_that_an_interrupt_kept_from_being_woken_begins_nevertheless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "_LOOK_S", SHORT_S)
    for step in itertools.count():
        calls = Calls()
        taken = [calls.turns.take(ENDLESS, Cancellation())]
        waiting = calls.wait("a")
        is_over = not interrupt_at(step, lambda: calls.turns.give_back(taken.pop()))  # noqa: B023 - it is called here
        waiting.result(SECONDS)
        if is_over:
            break
    assert step > 5


def call_soon(turns: Turns) -> None:
    with suppress(NoTurnError), turn(turns, Deadline.after(SHORT_S)):
        pass


def test_no_turn_is_lost_among_many_calls() -> None:
    turns, running, most = Turns(3), 0, 0
    mutex = threading.Lock()

    def call(number: int) -> None:
        nonlocal running, most
        try:
            with turn(turns, Deadline.after(SECONDS if number % 3 else 1e-3)):
                with mutex:
                    running += 1
                    most = max(most, running)
                with mutex:
                    running -= 1
        except NoTurnError:
            assert number % 3 == 0

    with ThreadPoolExecutor(20) as threads:
        list(threads.map(call, range(2000)))
        assert most <= 3
        together = threading.Barrier(3)

        def meet(_: int) -> None:
            with turn(turns, Deadline.after(SECONDS)):
                together.wait(SECONDS)

        list(threads.map(meet, range(3)))
