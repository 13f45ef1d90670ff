"""A client process that sends requests one after the other and checks every bit of every answer.

Run as ``python -m tests.faults.load_process TARGET KIND THREADS SEED PROBLEMS SHORTEST_S LONGEST_S
TOKEN``. KIND is a transport of the client, or "aio" for the asyncio client; each call's timeout is drawn between
SHORTEST_S and LONGEST_S; TOKEN may be empty.

It obeys the lines of its stdin: on "run" its threads share a new client and begin, on "pause" they end and the client
is closed. It writes JSON lines: while it runs, a list of the monotonic time and of how many answers each thread had got
by then; after a pause, the whole tally, a dict.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import threading
import time
from collections import Counter
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

from tests.faults import workload

import bngrad

GRACE_S = 15.0
"""How long after its timeout a call may end before it counts as lost."""
_REPORT_S = 0.05
_PAUSE_S = 0.05


def main() -> None:
    """Obeys stdin until it ends."""
    target, kind, threads, seed, problems, shortest_s, longest_s, token = sys.argv[1:]
    caller = _Caller(workload.load(Path(problems)), (float(shortest_s), float(longest_s)), token or None)
    _write("ready")
    for command in sys.stdin:
        if command == "run\n":
            caller.run(target, kind, int(threads), int(seed))
        elif command == "pause\n":
            _write(caller.pause())


def _write(what: Any) -> None:
    sys.stdout.write(f"{json.dumps(what)}\n")
    sys.stdout.flush()


class _Caller:
    """The threads of this process, and the outcomes of their requests."""

    def __init__(self, problems: list[workload.Problem], timeouts_s: tuple[float, float], token: str | None) -> None:
        self._problems = problems
        self._weights = [problem.request.weight for problem in problems]
        self._longest_s = timeouts_s[1]
        self._timeouts_s = timeouts_s
        self._token = token
        self._mutex = threading.Lock()

    def run(self, target: str, kind: str, threads: int, seed: int) -> None:
        self._pausing = threading.Event()
        self._tally: Counter[str] = Counter()
        self._examples: dict[str, str] = {}
        self._answers = [0] * threads
        self._client: _Client | _AsyncClient = (
            _AsyncClient(target, self._token) if kind == "aio" else _Client(target, kind, self._token)
        )
        self._threads = [
            threading.Thread(target=self._ask, args=(index, random.Random(f"{seed}/{index}")), daemon=True)
            for index in range(threads)
        ]
        self._reporting = threading.Thread(target=self._report, daemon=True)
        for thread in (*self._threads, self._reporting):
            thread.start()

    def pause(self) -> dict[str, Any]:
        self._pausing.set()
        deadline = time.monotonic() + self._longest_s + GRACE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                self._count("lost", "a call did not end")
        self._client.close()
        self._reporting.join()  # so that its lines do not mix with the tally
        return {"counts": self._tally, "examples": self._examples}

    def _report(self) -> None:
        while not self._pausing.wait(_REPORT_S):
            _write([time.monotonic(), self._answers])

    def _ask(self, index: int, rng: random.Random) -> None:
        while not self._pausing.is_set():
            (problem,) = rng.choices(self._problems, self._weights)
            timeout_s = rng.uniform(*self._timeouts_s)
            begin = time.monotonic()
            outcome, why = self._outcome(problem, timeout_s)
            late_s = time.monotonic() - begin - timeout_s
            if late_s > GRACE_S:
                outcome, why = "lost", f"{outcome} came {late_s:.1f} s after the timeout: {why}"
            self._count(outcome, why)
            if outcome == "answered":
                self._answers[index] += 1
            elif outcome not in ("wrong", "DeadlineExceededError"):
                time.sleep(_PAUSE_S)

    def _outcome(self, problem: workload.Problem, timeout_s: float) -> tuple[str, str]:
        try:
            outputs = self._client.run(problem, timeout_s)
        except bngrad.BngradError as error:
            return type(error).__name__, str(error)
        except (Exception, CancelledError) as error:
            return "undocumented", repr(error)
        return ("answered", "") if problem.is_answered_by(outputs) else ("wrong", repr(problem.request))

    def _count(self, outcome: str, why: str) -> None:
        with self._mutex:
            self._tally[outcome] += 1
            if why:
                self._examples.setdefault(outcome, why)


class _Client:
    def __init__(self, target: str, transport: Any, token: str | None) -> None:
        self._client = bngrad.Client(target, transport=transport, token=token, insecure=True)

    def run(self, problem: workload.Problem, timeout_s: float) -> tuple[Any, ...]:
        outputs: tuple[Any, ...] = problem.request.case.run(self._client, problem.inputs, timeout=timeout_s)
        return outputs

    def close(self) -> None:
        self._client.close()


class _AsyncClient:
    """The client for asyncio, on an event loop in a thread of its own."""

    def __init__(self, target: str, token: str | None) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._client = bngrad.aio.Client(target, token=token, insecure=True)

    def run(self, problem: workload.Problem, timeout_s: float) -> tuple[Any, ...]:
        call = problem.request.case.run(self._client, problem.inputs, timeout=timeout_s)
        outputs: tuple[Any, ...] = asyncio.run_coroutine_threadsafe(call, self._loop).result()
        return outputs

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._client.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)


if __name__ == "__main__":
    main()
