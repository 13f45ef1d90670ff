"""What ends calls: deadlines, other threads, and Ctrl-C."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
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

    with pytest.raises(KeyboardInterrupt), held_back():
        interrupt()
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("default_handler")
def test_the_programs_own_handler_is_called_once_per_block() -> None:
    called = []

    def handle(number: int, frame: FrameType | None) -> None:
        called.append(number)

    signal.signal(signal.SIGINT, handle)
    with held_back():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert not called
    assert called == [signal.SIGINT]


@pytest.mark.usefixtures("default_handler")
def test_an_error_of_the_block_is_raised_without_ctrl_c() -> None:
    with pytest.raises(ZeroDivisionError), held_back():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("default_handler")
def test_a_program_that_ignores_ctrl_c_still_does() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with held_back():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.mark.usefixtures("default_handler")
def test_another_thread_leaves_the_handler_as_it_is() -> None:
    found = []

    def look() -> None:
        with held_back():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]
