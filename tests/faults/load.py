"""Mixed load from client processes with several threads each, and the tally of outcomes."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.server import RestartableServer
from tests.servers import wait_until

THREADS = 2
TIMEOUTS_S = (60.0, 60.0)
"""The shortest and longest timeout of calls; a busy machine may need half of it to restart a server."""
_PROGRESS_TIMEOUT_S = 90.0
"""A thread without an answer for this long counts as blocked."""


@dataclass
class Tally:
    """The outcomes of requests.

    Attributes:
        counts: How many were "answered" with the right bits, "wrong", "lost" (no answer and no status within timeout
            and grace), "undocumented" (an exception that is no BngradError), or ended with an error, by its class.
        examples: The first message of each kind.
    """

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    @property
    def requests(self) -> int:
        return self.counts.total()

    @property
    def statuses(self) -> Counter[str]:
        """Those that ended with a documented error."""
        return Counter({name: count for name, count in self.counts.items() if name.endswith("Error")})

    def add(self, other: Tally) -> None:
        self.counts += other.counts
        self.examples = {**other.examples, **self.examples}

    def breaches(self, allowed: frozenset[str]) -> list[str]:
        """Returns the outcomes other than answers and allowed errors."""
        return [
            f"{count} {name}: {self.examples.get(name, '')}"
            for name, count in self.counts.items()
            if name != "answered" and name not in allowed
        ]


class LoadProcess:
    """A process that runs `tests.faults.load_process`, paused at first.

    Attributes:
        counted: A monotonic time, and the number of right answers of each thread by then in this run.
    """

    def __init__(
        self,
        service: RestartableServer,
        target: str,
        kind: str,
        problems: Path,
        *,
        threads: int = THREADS,
        timeouts_s: tuple[float, float] = TIMEOUTS_S,
        seed: int = 0,
    ) -> None:
        """Returns before the process is ready; ``kind`` is a transport or "aio", ``timeouts_s`` a range."""
        self.name = f"{kind} by {target.partition(':')[0]}"
        arguments = [target, kind, threads, seed, problems, *timeouts_s, service.token]
        command = [sys.executable, "-m", "tests.faults.load_process", *map(str, arguments)]
        self.process = subprocess.Popen(
            [*service.inside(), *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._threads = threads
        self.counted = (0.0, [0] * threads)
        self._tally: Tally | None = None
        self._paused = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def run(self) -> None:
        """Starts requests once the process is ready."""
        self.counted = (0.0, [0] * self._threads)
        self._tally = None
        self._paused.clear()
        self._tell("run")

    def begin_pause(self) -> None:
        """Makes it end its calls and close its client."""
        self._tell("pause")

    def finish_pause(self) -> Tally:
        assert self._paused.wait(sum(TIMEOUTS_S)), f"{self.name} does not end"
        assert self._tally is not None, f"{self.name} ended"
        return self._tally

    @property
    def answers(self) -> list[int]:
        """A lower bound of the right answers of each thread in this run."""
        return self.counted[1]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def _tell(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            said = json.loads(line)
            if isinstance(said, list):
                self.counted = (said[0], said[1])
            elif isinstance(said, dict):
                examples = {outcome: f"{self.name}: {why}" for outcome, why in said["examples"].items()}
                self._tally = Tally(Counter(said["counts"]), examples)
                self._paused.set()
        self._paused.set()


class Load(AbstractContextManager["Load"]):
    """A process for every transport, over TCP and the Unix socket, for the length of a ``with`` block."""

    def __init__(self, service: RestartableServer, problems: Path, seed: int = 0) -> None:
        self.problems = problems
        ways = [
            (service.target, "auto"),
            (service.target, "unary"),
            (service.target, "stream"),
            (service.unix_target, "shared"),
            (service.unix_target, "aio"),
        ]
        self._callers = [LoadProcess(service, target, kind, problems, seed=seed) for target, kind in ways]

    def __exit__(self, *exc_info: object) -> None:
        for caller in self._callers:
            caller.close()

    @contextmanager
    def running(self, tally: Tally) -> Iterator[None]:
        """Runs the load; the block begins once every thread has an answer, and the tally is complete after it."""
        for caller in self._callers:
            caller.run()
        try:
            self.wait_for_answers()
            yield
        finally:
            for caller in self._callers:
                caller.begin_pause()
            for caller in self._callers:
                tally.add(caller.finish_pause())

    def wait_for_answers(self) -> None:
        """Waits until every thread has got an answer to the request in flight now, or to a later one."""
        begin = time.monotonic()
        before: dict[LoadProcess, list[int]] = {}

        def is_answered(caller: LoadProcess) -> bool:
            counted_at, answers = caller.counted
            if counted_at < begin:  # answers from before now may be missing in it
                return False
            return all(now > then for now, then in zip(answers, before.setdefault(caller, answers), strict=True))

        def waiting() -> list[str]:
            return [caller.name for caller in self._callers if not is_answered(caller)]

        try:
            wait_until(lambda: not waiting(), _PROGRESS_TIMEOUT_S, poll_s=0.05)
        except AssertionError:
            raise AssertionError(f"no answer within {_PROGRESS_TIMEOUT_S:.0f} s for: {', '.join(waiting())}") from None
