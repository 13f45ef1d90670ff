"""What ends calls: deadlines, other threads, and Ctrl-C."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from types import FrameType

import pytest

from bngrad._deadline import Cancellation, held_back


def test_what_is_attached_after_the_cancellation_is_called_at_once() -> None:
    cancellation, called = Cancellation(), []
    cancellation.cancel()
    with cancellation.calls(lambda: called.append(1)):
        assert called == [1]
    began = time.monotonic()
    cancellation.sleep(30.0)
    assert time.monotonic() - began < 10.0


@pytest.fixture
def default_handler() -> Iterator[None]:
    """Of Python; a run in the background ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("default_handler")
def test_ctrl_c_takes_effect_at_the_end_of_the_block() -> None:
    done = []

    def interrupt() -> None:
        signal.raise_signal(signal.SIGINT)
        done.append(True)

    with pytest.raises(KeyboardInterrupt):
        held_back(interrupt)
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("default_handler")
def test_the_programs_own_handler_is_called_once_per_block() -> None:
    called = []

    def handle(number: int, frame: FrameType | None) -> None:
        called.append(number)

    def interrupt_twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert not called

    signal.signal(signal.SIGINT, handle)
    held_back(interrupt_twice)
    assert called == [signal.SIGINT]


@pytest.mark.usefixtures("default_handler")
def test_an_error_of_the_block_is_raised_without_ctrl_c() -> None:
    with pytest.raises(ZeroDivisionError):
        held_back(lambda: 1 // 0)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("default_handler")
def test_a_program_that_ignores_ctrl_c_still_does() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    held_back(lambda: signal.raise_signal(signal.SIGINT))
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.mark.usefixtures("default_handler")
def test_another_thread_leaves_the_handler_as_it_is() -> None:
    found = []

    def look() -> None:
        found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=held_back, args=(look,))
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]


@pytest.mark.usefixtures("default_handler")
def test_a_handler_that_raises_at_any_moment_never_leaves_ctrl_c_held_back() -> None:
    """SIGALRM, as programs end what takes too long."""

    def handle(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, handle)
    try:
        for delay_us in range(1, 3001):
            until = time.monotonic() + 0.1  # Python drops an error that is raised amid a finaliser
            with suppress(TimeoutError):
                signal.setitimer(signal.ITIMER_REAL, (1 + delay_us % 300) * 1e-6)
                while time.monotonic() < until:
                    held_back(int)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("default_handler")
def test_calls_are_made_where_the_main_thread_is_not_that_of_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def look() -> None:
        monkeypatch.setattr(threading, "main_thread", threading.current_thread)  # as where a program embeds Python
        found.append(held_back(lambda: 1))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [1]
