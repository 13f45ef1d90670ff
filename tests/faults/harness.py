"""Where a fault happens, and what must hold meanwhile and afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.faults import resource_usage
from tests.faults.load import Load, Tally
from tests.faults.server import RestartableServer


@dataclass(frozen=True)
class Harness:
    """A server, the load on it, and the file by which its clock is set.

    Attributes:
        service: The server.
        load: Who calls it; running whenever a fault is injected.
        clock: See `tests.faults.machine_faults.set_clock`.
    """

    service: RestartableServer
    load: Load
    clock: Path

    def rounds(self, seconds: float) -> Iterator[int]:
        """Counts rounds until the time is over; at least one."""
        deadline = time.monotonic() + seconds
        number = 0
        while number == 0 or time.monotonic() < deadline:
            yield number
            number += 1


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong.

    Attributes:
        inject: Makes it happen for so many seconds, while the load is running, and returns when all can be well again;
            raises AssertionError if the server does not do what it should meanwhile.
        allowed: The errors, by class, that callers may get instead of answers, though none may be lost.
        mixes: Others may happen at the same time.
        kills_workers: What it says; a request that two workers die of is given up.
    """

    inject: Callable[[Harness, float, Random], None]
    allowed: frozenset[str] = frozenset()
    mixes: bool = True
    kills_workers: bool = False

    @property
    def name(self) -> str:
        return self.inject.__name__


class InvariantError(AssertionError):
    """The server did not do under a fault what it should.

    Attributes:
        tally: What became of the requests.
    """

    def __init__(self, what: str, tally: Tally) -> None:
        super().__init__(what)
        self.tally = tally


def endure(scene: Harness, faults: list[Fault], seconds: float, rng: Random) -> Tally:
    """Injects faults under load, all at once, and holds the server to its promises.

    Raises:
        BrokenPromiseError: A wrong answer, a lost request, an error that is not allowed, somebody who was held up, a
            traceback in the log, or something that is left of memory, descriptors, processes or shared memory.
    """
    service, load = scene.service, scene.load
    before, logged = resource_usage.measure(service), len(service.log())
    tally = Tally()
    try:
        with load.running(tally):
            _inject(scene, faults, seconds, rng)
            service.wait_until_whole()
            load.wait_for_answers()
        assert not (breaches := tally.breaches(_allowed(faults))), breaches
        assert not (tracebacks := service.tracebacks(logged)), tracebacks
        resource_usage.wait_until_back(service, before)
    except Exception as error:
        service.restart()  # the next fault finds a server that is well
        warm_up(scene)
        raise InvariantError(str(error), tally) from error
    return tally


def _allowed(faults: list[Fault]) -> frozenset[str]:
    """The errors that may be; with two that kill workers at once, a request may have been in both its hands."""
    allowed = frozenset[str]().union(*(fault.allowed for fault in faults))
    return allowed | {"InternalError"} if sum(fault.kills_workers for fault in faults) > 1 else allowed


def _inject(scene: Harness, faults: list[Fault], seconds: float, rng: Random) -> None:
    with ThreadPoolExecutor(len(faults)) as threads:
        injected = [threads.submit(fault.inject, scene, seconds, Random(rng.random())) for fault in faults]
    for future in injected:
        future.result()


def warm_up(scene: Harness, seconds: float = 2.0) -> None:
    """Has a server touch the memory that it will go on using."""
    with scene.load.running(Tally()):
        for _ in scene.rounds(seconds):
            scene.load.wait_for_answers()
