"""One process of the load generator: carries out plans, and reports the outcome of each request.

In an open loop the times are fixed in advance, and latency counts from them: a request that was sent late because no
caller was free includes its wait.
"""

from __future__ import annotations

import contextlib
import os
import signal
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np
from benchmarks.load.answers import WrongAnswerError
from benchmarks.load.mix import Item

import bngrad

LEAN = "lean"
"""The transport of `benchmarks.load.lean`; all others are `bngrad.Client`'s."""

Row = tuple[int, float, float, float, int, bool]
"""Item; when it was due, sent and done on the monotonic clock; its `Status`; whether no caller was free when due."""


@dataclass(frozen=True)
class Setup:
    """What a process calls, and how: at most ``callers`` requests in flight, on these cores."""

    target: str
    transport: str
    items: tuple[Item, ...]
    callers: int
    cores: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """The requests that a process makes next.

    Attributes:
        due: When to send each, on the monotonic clock, which all processes share; None for a closed loop, in which
            each caller sends the next one when it is free.
        start: When a closed loop begins.
        until: When it ends, if not before with the last request.
        callers: The most requests in flight; no more than in the setup.
        timeout: Seconds that each request may take from when it is due.
    """

    items: np.ndarray[Any, np.dtype[np.int64]]
    due: np.ndarray[Any, np.dtype[np.float64]] | None
    start: float
    until: float
    callers: int
    timeout: float


@dataclass(frozen=True)
class Outcome:
    """The outcome of a plan: a row for each request, and examples of errors that are no refusals or timeouts."""

    rows: list[Row]
    cpu_seconds: float
    errors: list[str]


class Generator(Protocol):
    def run(self, plan: Plan) -> Outcome:
        """Returns when the last request has ended."""


def _connected(setup: Setup) -> AbstractContextManager[Generator]:
    if setup.transport == LEAN:
        from benchmarks.load import lean  # noqa: PLC0415 - it imports this module

        return lean.connect(setup)
    from benchmarks.load import sdk  # noqa: PLC0415

    return sdk.connect(setup)


def main(pipe: Connection, setup: Setup) -> None:
    """The process: answers each plan with its outcome until the pipe is closed. Sends the reason if it cannot start."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The benchmark handles Ctrl-C, and then closes the pipe.
    os.sched_setaffinity(0, setup.cores)
    with contextlib.ExitStack() as stack:
        try:
            generator = stack.enter_context(_connected(setup))
        except (bngrad.BngradError, WrongAnswerError, OSError) as error:
            pipe.send(f"{type(error).__name__}: {error}")
            return
        pipe.send(None)
        try:
            while True:
                pipe.send(generator.run(pipe.recv()))
        except (EOFError, ConnectionError):
            os._exit(0)  # Without waiting for requests in flight.
