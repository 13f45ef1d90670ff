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
    """A contestant's bits are not the kernel's."""


def check(name: str, answer: Gradients | None, expected: Gradients) -> None:
    """Compares bit for bit.

    Raises:
        WrongAnswerError: They differ.
    """
    for field, got, want in zip(expected._fields, answer or expected, expected, strict=True):
        if got.shape != want.shape or not np.array_equal(got.view(np.uint32), want.view(np.uint32)):
            raise WrongAnswerError(f"{name}: {field} differs from the kernel's")


def latencies(calls: Mapping[str, Call], seconds: float, rounds: int) -> dict[str, list[float]]:
    """The time of each call, in seconds; each contestant calls for so many seconds in all, and at least thrice."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for names in _turns(calls, rounds):
        for name in names:
            spent = times[name]
            enough = sum(spent) >= seconds and len(spent) >= _LEAST_CALLS
            if not enough:
                spent += _turn(calls[name], seconds / rounds, warm_up=not spent or spent[-1] < _QUICK_SECONDS)
    return times


def _turns(calls: Mapping[str, object], rounds: int) -> Iterator[list[str]]:
    """The order of each round: another contestant begins each time."""
    names = list(calls)
    for number in range(rounds):
        first = number % len(names)
        yield names[first:] + names[:first]


def _turn(call: Call, seconds: float, *, warm_up: bool) -> list[float]:
    """One untimed call where that costs little, so that idle threads wake and others' fall asleep; then timed ones.

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
    """Requests per second of each contestant, called by as many threads as it has calls: the median of the rounds."""
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
