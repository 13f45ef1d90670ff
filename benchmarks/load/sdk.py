"""Calls of the public client, each from a thread."""

from __future__ import annotations

import collections
import contextlib
import inspect
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from benchmarks.load import mix
from benchmarks.load.answers import Expected, Status, check_quiet_answer
from benchmarks.load.generator import Outcome, Plan, Row, Setup
from benchmarks.load.mix import Item

import bngrad

# Refused requests must be counted as refused.
_NO_RETRIES = {"retries": False} if "retries" in inspect.signature(bngrad.Client).parameters else {}
_SWITCH_INTERVAL_S = 1e-3
"""A thread that checks a large answer must not delay others."""
_QUIET_TIMEOUT_S = 120.0
_REMEMBERED_ERRORS = 5


@contextlib.contextmanager
def connect(setup: Setup) -> Iterator[Threads]:
    """Connects, makes each kind of request once, and keeps the answers."""
    options: dict[str, Any] = {"transport": setup.transport, **_NO_RETRIES}
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    with bngrad.Client(setup.target, **options) as client:
        yield Threads([_Request(client, item, seed) for seed, item in enumerate(setup.items)])


class Threads:
    """Carries out plans with a thread for each caller."""

    def __init__(self, requests: list[_Request]) -> None:
        self._requests = requests
        self._errors: collections.deque[str] = collections.deque(maxlen=_REMEMBERED_ERRORS)

    def run(self, plan: Plan) -> Outcome:
        cpu_start = time.process_time()
        self._errors.clear()
        turns = _Turns(plan)
        with ThreadPoolExecutor(plan.callers) as pool:
            callers = [pool.submit(self._call_in_turn, turns, plan.timeout) for _ in range(plan.callers)]
            rows = [row for caller in callers for row in caller.result()]
        return Outcome(rows, time.process_time() - cpu_start, list(self._errors))

    def _call_in_turn(self, turns: _Turns, timeout: float) -> list[Row]:
        rows = []
        while (turn := turns.next()) is not None:
            item, due, waited = turn
            sent = time.monotonic()
            rest = due + timeout - sent
            status, done = (Status.NOT_SENT, sent) if rest <= 0 else self._call(self._requests[item], rest)
            if status is Status.OK and done > due + timeout:
                status = Status.DEADLINE_EXCEEDED  # An answer, but too late to be of use.
            rows.append((item, due, sent, done, int(status), waited))
        return rows

    def _call(self, request: _Request, timeout: float) -> tuple[Status, float]:
        try:
            answer = request.call(timeout)
        except bngrad.BngradError as error:
            status = _status_of(error)
            if status in (Status.UNAVAILABLE, Status.OTHER):
                self._errors.append(f"{type(error).__name__}: {error}")
            return status, time.monotonic()
        done = time.monotonic()
        return Status.OK if request.is_right(answer) else Status.WRONG, done


class _Turns:
    """Distributes a plan's requests: one caller at a time waits until the next one is due."""

    def __init__(self, plan: Plan) -> None:
        self._items = plan.items.tolist()
        self._due = None if plan.due is None else plan.due.tolist()
        self._start, self._until = plan.start, plan.until
        self._next = 0
        self._turn = threading.Lock()

    def next(self) -> tuple[int, float, bool] | None:
        """Returns the item, its due time, and whether no caller was free then."""
        came = time.monotonic()
        with self._turn:
            number = self._next
            if number >= len(self._items):
                return None
            self._next += 1
            now = time.monotonic()
            due: float = max(now, self._start) if self._due is None else self._due[number]
            if self._due is None and now >= self._until:
                return None
            if due > now:
                time.sleep(due - now)
            return self._items[number], due, due < came


class _Request:
    """One kind of request, with its inputs in shared memory if there is any."""

    def __init__(self, client: bngrad.Client, item: Item, seed: int) -> None:
        problem = mix.problem(item, seed)
        tensors = [client.empty(item.spec.shape, item.spec.dtype) for _ in range(2)]
        np.copyto(tensors[0], problem.y_backprop)
        np.copyto(tensors[1], problem.x)
        self._client = client
        self._arguments: dict[str, Any] = {
            "y_backprop": tensors[0],
            "x": tensors[1],
            "scale": problem.scale,
            "reserve_space_1": problem.reserve_space_1,
            "reserve_space_2": problem.reserve_space_2,
            "epsilon": item.spec.epsilon,
            "data_format": item.data_format,
        }
        answer = self.call(_QUIET_TIMEOUT_S)
        check_quiet_answer(str(item), problem, answer[:3])
        self._expected = [Expected(array) for array in answer[:3]]

    def call(self, timeout: float) -> Any:
        return self._client.fused_batch_norm_grad_v2(**self._arguments, timeout=timeout)

    def is_right(self, answer: Any) -> bool:
        verdicts = [expected.is_in(array) for expected, array in zip(self._expected, answer, strict=False)]
        return all(verdicts)


def _status_of(error: bngrad.BngradError) -> Status:
    if isinstance(error, bngrad.ResourceExhaustedError):
        return Status.RESOURCE_EXHAUSTED
    if isinstance(error, bngrad.DeadlineExceededError):
        return Status.DEADLINE_EXCEEDED
    return Status.UNAVAILABLE if isinstance(error, bngrad.UnavailableError) else Status.OTHER
