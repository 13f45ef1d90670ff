"""The processes of the load generator, controlled from the benchmark's own."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from benchmarks.load import generator, mix
from benchmarks.load.answers import Status
from benchmarks.load.generator import Outcome, Plan, Setup
from benchmarks.load.schedule import arrivals

_HEAD_START_S = 0.2
"""The time between sending a plan and its first request, so that all processes have it by then."""
_MANY = 100_000
_LOOK_UP_S = 0.5


class FleetError(Exception):
    """A process of the generator did not start, or ended."""


@dataclasses.dataclass(frozen=True)
class Run:
    """The outcome of a load.

    Attributes:
        start: When it began, on the monotonic clock.
        seconds: Its duration: as requested, or until the last answer.
        callers: The most requests in flight.
        outcome: The combined outcome of all processes.
    """

    start: float
    seconds: float
    outcome: Outcome


class Fleet:
    """Processes that share every load between them."""

    def __init__(self, pipes: list[Connection], setup: Setup, seed: int, on_wait: Callable[[], None]) -> None:
        self.setup = setup
        self._pipes = pipes
        self._rng = np.random.default_rng(seed)
        self._on_wait = on_wait

    def closed_loop(self, callers: int, timeout: float, *, seconds: float = math.inf, count: int = _MANY) -> Run:
        """Runs callers that each send the next request when they have an answer, for a time or a count."""
        items = mix.deal(self.setup.items, count, self._rng)
        start = time.monotonic() + _HEAD_START_S
        plan = Plan(items, None, start, start + seconds, callers, timeout)
        outcome = self._run([
            dataclasses.replace(plan, items=items[i :: len(self._pipes)], callers=share)
            for i, share in enumerate(_shares(callers, len(self._pipes)))
        ])  # fmt: skip
        return Run(start, min(seconds, max(row[3] for row in outcome.rows) - start), outcome)

    def open_loop(self, rate: float, seconds: float, callers: int, timeout: float) -> Run:
        """Requests that arrive at random, at a rate per second in the mean, whatever becomes of those before."""
        start = time.monotonic() + _HEAD_START_S
        due = start + arrivals(rate, seconds, self._rng)
        items = mix.deal(self.setup.items, len(due), self._rng)
        number = len(self._pipes)
        outcome = self._run([
            Plan(items[i::number], due[i::number], 0, math.inf, share, timeout)
            for i, share in enumerate(_shares(callers, number))
        ])  # fmt: skip
        return Run(start, seconds, outcome)

    def probe(self, timeout: float) -> float:
        """The seconds that a single request of mean size takes; infinity if it failed."""
        outcome = self._run([Plan(np.array([_probed(self.setup)]), None, 0, math.inf, 1, timeout)])
        _, due, _, done, status, _ = outcome.rows[0]
        return done - due if status == Status.OK else math.inf

    def _run(self, plans: list[Plan]) -> Outcome:
        try:
            used = [(pipe, plan) for pipe, plan in zip(self._pipes, plans, strict=False) if plan.callers]
            for pipe, plan in used:
                pipe.send(plan)
            outcomes: list[Outcome] = []
            for pipe, _ in used:
                while not pipe.poll(_LOOK_UP_S):
                    self._on_wait()
                outcomes.append(pipe.recv())
        except (EOFError, ConnectionError) as error:
            raise FleetError("a process of the generator has ended") from error
        return Outcome(
            [row for outcome in outcomes for row in outcome.rows],
            sum(outcome.cpu_seconds for outcome in outcomes),
            [text for outcome in outcomes for text in outcome.errors],
        )


@contextlib.contextmanager
def running(processes: int, setup: Setup, on_wait: Callable[[], None], *, seed: int = 0) -> Iterator[Fleet]:
    """Starts processes, each with its client, its inputs and the answers to expect.

    Calls ``on_wait`` repeatedly while they work. Raises `FleetError` if the server answered wrongly or not at all.
    """
    context = multiprocessing.get_context("spawn")
    pipes = []
    children: list[Any] = []
    try:
        for callers in _shares(setup.callers, processes):
            ours, theirs = context.Pipe()
            pipes.append(ours)
            child = context.Process(
                target=generator.main, args=(theirs, dataclasses.replace(setup, callers=callers)), daemon=True
            )
            child.start()
            children.append(child)
            theirs.close()
        for pipe in pipes:
            try:
                fault = pipe.recv()
            except EOFError:
                fault = "it ended"
            if fault is not None:
                raise FleetError(f"a process of the generator could not begin: {fault}")
        yield Fleet(pipes, setup, seed, on_wait)
    finally:
        for pipe in pipes:
            pipe.close()
        for child in children:
            child.join(5)
            child.kill()


def _shares(callers: int, processes: int) -> list[int]:
    return [callers // processes + (i < callers % processes) for i in range(processes)]


def _probed(setup: Setup) -> int:
    """The kind of request that a single call measures: the one nearest to the mean in size."""
    mean = mix.mean_nbytes(setup.items)
    return min(range(len(setup.items)), key=lambda i: abs(setup.items[i].nbytes - mean))
