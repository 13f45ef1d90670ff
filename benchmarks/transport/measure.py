"""Times calls: alone, and from many threads at once. Contestants take turns."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from benchmarks.transport import Call, Gradients

_LEAST_CALLS = 3
_QUICK_SECONDS = 0.05


class WrongAnswerError(Exception):
    """A contestant's answer differs from the kernel's."""


def check(name: str, answer: Gradients | None, expected: Gradients) -> None:
    """Compares bit for bit."""
    for field, got, want in zip(expected._fields, answer or expected, expected, strict=True):
        if got.shape != want.shape or not np.array_equal(got.view(np.uint32), want.view(np.uint32)):
            raise WrongAnswerError(f"{name}: {field} differs from the kernel's")


def latencies(calls: Mapping[str, Call], seconds: float, rounds: int) -> dict[str, list[float]]:
    """Returns the time of each call in seconds; each contestant calls for ``seconds`` in all, at least three times."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for names in _turns(calls, rounds):
        for name in names:
            spent = times[name]
            enough = sum(spent) >= seconds and len(spent) >= _LEAST_CALLS
            if not enough:
                spent += _turn(calls[name], seconds / rounds, warm_up=not spent or spent[-1] < _QUICK_SECONDS)
    return times


def _turns(calls: Mapping[str, object], rounds: int) -> Iterator[list[str]]:
    """Yields the order of each round, which begins with another contestant each time."""
    names = list(calls)
    for number in range(rounds):
        first = number % len(names)
        yield names[first:] + names[:first]


def _turn(call: Call, seconds: float, *, warm_up: bool) -> list[float]:
    """Makes an untimed call if that is cheap, so that the contestant's threads are awake; then timed ones.

    Freeing an answer is not timed.
    """
    if warm_up:
        call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        answer = call()
        times.append(time.perf_counter() - start)
        del answer
    return times


def rates(calls: Mapping[str, list[Call]], seconds: float, rounds: int) -> dict[str, float]:
    """Returns each contestant's requests per second, with a thread for each of its calls: the median of the rounds."""
    measured: dict[str, list[float]] = {name: [] for name in calls}
    for names in _turns(calls, rounds):
        for name in names:
            measured[name].append(_rate(calls[name], seconds / rounds))
    return {name: float(np.median(values)) for name, values in measured.items()}


def _rate(calls: list[Call], seconds: float) -> float:
    for call in calls:
        call()
    stop = threading.Event()

    def work(call: Call) -> int:
        count = 0
        while not stop.is_set():
            call()
            count += 1
        return count

    with ThreadPoolExecutor(len(calls)) as pool:
        start = time.perf_counter()
        running = [pool.submit(work, call) for call in calls]
        time.sleep(seconds)
        stop.set()
        count = sum(future.result() for future in running)
        return count / (time.perf_counter() - start)
