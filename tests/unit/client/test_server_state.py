"""What is known of a server: whether it is frozen, and its load."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc
import pytest
from tests.clock import Clock
from tests.unit.client.calls import interrupt_at

from bngrad._errors import UnavailableError
from bngrad._transports import server_state
from bngrad._transports.server_state import ServerState
from bngrad_wire.load_report import LoadReport

OK, LATE = grpc.StatusCode.OK, grpc.StatusCode.DEADLINE_EXCEEDED


@dataclass
class Answer:
    """A question to the server; ends when the test sets how."""

    end: grpc.StatusCode | None = None
    said: str | None = "Connection refused"

    def done(self) -> bool:
        return self.end is not None

    def details(self) -> str | None:
        return self.said if self.end is grpc.StatusCode.UNAVAILABLE else ""

    def code(self) -> grpc.StatusCode:
        assert self.end is not None
        return self.end


@dataclass
class Server:
    """A server that is asked, and its state."""

    clock: Clock
    may_leave: bool = True
    error: Exception | None = None
    questions: list[Answer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.state = ServerState(self.ask, lambda: self.may_leave)
        self.state.hear()

    def ask(self) -> Answer:
        if self.error is not None:
            raise self.error
        self.questions.append(Answer())
        return self.questions[-1]

    def is_lost_after(self, seconds: float, waited_s: float) -> bool:
        self.clock.now += seconds
        return self.state.is_lost(waited_s)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    clock = Clock()
    monkeypatch.setattr(server_state, "time", clock)
    return Server(clock)


def test_a_server_is_asked_after_two_silent_seconds(server: Server) -> None:
    assert not server.is_lost_after(1, 1)
    server.state.hear()
    assert not server.is_lost_after(1, 2)
    assert not server.questions
    assert not server.is_lost_after(1, 1)  # the silence is longer than this call
    assert not server.questions
    assert not server.is_lost_after(0, 3)
    assert len(server.questions) == 1


@pytest.mark.parametrize(
    ("end", "is_lost"),
    [
        (LATE, True),
        (grpc.StatusCode.UNAVAILABLE, False),  # it stops: the calls that it has are answered
        (OK, False),
        (grpc.StatusCode.UNAUTHENTICATED, False),
        (grpc.StatusCode.CANCELLED, False),
    ],
)
def test_a_server_is_lost_if_it_does_not_answer(server: Server, end: grpc.StatusCode, is_lost: bool) -> None:
    server.is_lost_after(2, 2)
    assert not server.is_lost_after(4, 6)  # there is no answer yet
    server.questions[0].end = end
    assert server.is_lost_after(1, 7) is is_lost
    assert server.is_lost_after(0, 7) is is_lost  # for another call, too
    assert len(server.questions) == 1


@pytest.mark.parametrize("said", ["keepalive watchdog timeout", None])
def test_a_server_is_lost_if_its_connection_is(server: Server, said: str | None) -> None:
    server.is_lost_after(2, 2)
    server.questions[0].end, server.questions[0].said = grpc.StatusCode.UNAVAILABLE, said
    assert server.is_lost_after(1, 3)


def test_a_call_that_began_after_a_question_has_it_asked_again(server: Server) -> None:
    server.is_lost_after(2, 2)
    server.questions[0].end = LATE
    assert not server.is_lost_after(5, 4)
    assert len(server.questions) == 2
    assert server.is_lost_after(0, 7) is False  # the last answer is awaited
    server.questions[1].end = OK
    assert not server.is_lost_after(1, 5)
    assert not server.is_lost_after(1, 6)
    assert len(server.questions) == 2  # it was heard
    assert not server.is_lost_after(1, 7)
    assert len(server.questions) == 3


def test_nothing_is_asked_where_a_call_cannot_go_elsewhere(server: Server) -> None:
    server.may_leave = False
    assert not server.is_lost_after(60, 60)
    assert not server.questions


@pytest.mark.parametrize("error", [UnavailableError("no token"), ValueError("closed"), RuntimeError("no thread")])
def test_what_cannot_be_asked_is_no_answer(server: Server, error: Exception) -> None:
    server.error = error
    assert not server.is_lost_after(60, 60)


def test_no_call_waits_while_another_asks(server: Server) -> None:
    gets_token, has_token = threading.Event(), threading.Event()

    def ask() -> Answer:
        gets_token.set()
        assert has_token.wait(60)
        return Answer()

    state = ServerState(ask, lambda: True)
    server.clock.now += 60
    with ThreadPoolExecutor() as threads:
        first = threads.submit(state.is_lost, 60)
        assert gets_token.wait(60)
        try:
            assert threads.submit(state.is_lost, 60).result(timeout=60) is False
        finally:
            has_token.set()
        assert first.result() is False


def test_after_an_interrupt_at_any_step_other_calls_find_a_frozen_server(server: Server) -> None:
    with ThreadPoolExecutor(1) as threads:
        for step in itertools.count():
            frozen = Server(server.clock)
            server.clock.now += 60
            is_over = not interrupt_at(step, lambda: frozen.state.is_lost(60))  # noqa: B023 - it is called here
            assert not threads.submit(frozen.state.is_lost, 60).result(60)
            frozen.questions[-1].end = LATE
            assert threads.submit(frozen.state.is_lost, 60).result(60)
            if is_over:
                break
    assert step > 5


def test_the_load_is_the_last_one_that_can_be_read(server: Server) -> None:
    report = LoadReport(1235, 0.25, 3.5)
    for text in (b"binary", "no report", report.text(), None, "no report"):
        server.state.hear(text)
    assert server.state.load == report
    server.state.hear(report.text())
    load = server.state.load
    server.state.hear(report.text())
    assert server.state.load is load  # the same text is no new report
