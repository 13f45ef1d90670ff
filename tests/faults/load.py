"""Mixed load from client processes with several threads each, and the tally of what became of every request."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.server import RestartableServer
from tests.servers import wait_until

THREADS = 2
PATIENCE_S = (60.0, 60.0)
"""The timeouts of callers who wait for their answers; a busy machine may need half of it to start a server again."""
_PROGRESS_TIMEOUT_S = 90.0
"""A caller who gets no answer for so long is being held up."""


@dataclass
class Tally:
    """What became of requests.

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
        """What must not have happened, given the errors that may have."""
        return [
            f"{count} {name}: {self.examples.get(name, '')}"
            for name, count in self.counts.items()
            if name != "answered" and name not in allowed
        ]


class LoadProcess:
    """A process that runs `tests.faults.load_process`; it is paused at first.

    Attributes:
        name: What it is called in complaints.
        process: It.
        counted: When, on the monotonic clock, each of its threads had got how many right answers in this run.
    """

    def __init__(
        self,
        service: RestartableServer,
        target: str,
        kind: str,
        problems: Path,
        *,
        threads: int = THREADS,
        timeouts_s: tuple[float, float] = PATIENCE_S,
        seed: int = 0,
    ) -> None:
        """Returns before the process is ready.

        Args:
            service: Whom it calls.
            target: By which of its addresses.
            kind: A transport, or "aio".
            problems: What it asks for; see `tests.faults.workload.save`.
            threads: How many requests it has in flight.
            timeouts_s: The shortest and the longest.
            seed: Of its choices.
        """
        self.name = f"{kind} by {target.partition(':')[0]}"
        arguments = [target, kind, threads, seed, problems, *timeouts_s]
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
        """Lets it make requests, as soon as it is ready."""
        self.counted = (0.0, [0] * self._threads)
        self._tally = None
        self._paused.clear()
        self._tell("run")

    def begin_pause(self) -> None:
        """Has it end its calls and close its client."""
        self._tell("pause")

    def finish_pause(self) -> Tally:
        """What became of its requests."""
        assert self._paused.wait(sum(PATIENCE_S)), f"{self.name} does not end"
        assert self._tally is not None, f"{self.name} ended"
        return self._tally

    @property
    def answers(self) -> list[int]:
        """How many right answers each of its threads has got in this run, at least."""
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


class Load:
    """A caller for every transport, over TCP and over the Unix socket, for the length of a ``with`` block."""

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

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for caller in self._callers:
            caller.close()

    @contextmanager
    def running(self, tally: Tally) -> Iterator[None]:
        """Load during the block, from when everybody has had an answer; the tally is complete after the block."""
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
        """Returns once every thread of every caller has got an answer to what it is asking for now, or asks later."""
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
