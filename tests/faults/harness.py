"""Injects faults into a server under load, and checks its guarantees."""

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

USUAL = "usual"
"""The name of the server for most faults."""


@dataclass(frozen=True)
class Harness:
    """A server, the load on it, and the file that sets its clock; see `tests.faults.machine_faults.set_clock`."""

    service: RestartableServer
    load: Load
    clock: Path

    def rounds(self, seconds: float) -> Iterator[int]:
        """Yields 0, 1, ... until the time is over, at least once."""
        deadline = time.monotonic() + seconds
        number = 0
        while number == 0 or time.monotonic() < deadline:
            yield number
            number += 1


@dataclass(frozen=True)
class Fault:
    """A fault to inject.

    Attributes:
        inject: Makes it happen for this many seconds under load, and returns once the server can recover;
            raises AssertionError if the server misbehaves meanwhile.
        allowed: The names of error classes that calls may end with.
        mixes: Other faults may be injected at the same time.
        kills_workers: It kills workers; a request that loses two of them fails.
        server: The name of the server that it is for.
    """

    inject: Callable[[Harness, float, Random], None]
    allowed: frozenset[str] = frozenset()
    mixes: bool = True
    kills_workers: bool = False
    server: str = USUAL

    @property
    def name(self) -> str:
        return self.inject.__name__


class BrokenGuaranteeError(AssertionError):
    """The server broke a guarantee under a fault."""

    def __init__(self, what: str, tally: Tally) -> None:
        super().__init__(what)
        self.tally = tally


def endure(scene: Harness, faults: list[Fault], seconds: float, rng: Random) -> Tally:
    """Injects faults under load, all at once, and checks the server's guarantees.

    Raises:
        BrokenGuaranteeError: A wrong answer, a lost request, an error that is not allowed, a blocked client, a
            traceback in the log, or a leak of memory, descriptors, processes or shared memory.
    """
    service, load = scene.service, scene.load
    service.wait_until_whole()
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
        broken = BrokenGuaranteeError(str(error), tally)
        try:
            service.restart()  # so that the next fault begins with a healthy server
            warm_up(scene)
        except Exception as further:
            raise broken from further
        raise broken from error
    return tally


def _allowed(faults: list[Fault]) -> frozenset[str]:
    """Returns the allowed errors; two faults that kill workers may hit the same request."""
    allowed = frozenset[str]().union(*(fault.allowed for fault in faults))
    return allowed | {"InternalError"} if sum(fault.kills_workers for fault in faults) > 1 else allowed


def _inject(scene: Harness, faults: list[Fault], seconds: float, rng: Random) -> None:
    with ThreadPoolExecutor(len(faults)) as threads:
        injected = [threads.submit(fault.inject, scene, seconds, Random(rng.random())) for fault in faults]
    for future in injected:
        future.result()


def warm_up(scene: Harness, seconds: float = 2.0) -> None:
    """Waits until a server compiles nothing, and makes it touch the memory that it will keep using."""
    scene.service.wait_until_whole()
    with scene.load.running(Tally()):
        for _ in scene.rounds(seconds):
            scene.load.wait_for_answers()
