"""Processes that are killed, frozen and told to stop: workers, clients, the server's front."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from random import Random

import psutil
from tests.faults.harness import Harness
from tests.faults.load import LoadProcess
from tests.servers import is_running, wait_until

import bngrad

_FROZEN_TIMEOUT_S = 30.0
"""How soon a worker that does not answer must have been replaced."""
_GONE_TIMEOUT_S = 20.0
"""How soon nothing may be left of a server whose front process was killed, or told twice to stop; draining may last
longer."""
_TRANSPORTS = ("auto", "unary", "stream", "shared", "aio")
_STORM_THREADS = 16
_SHORT_S = (0.0001, 0.02)
_TOO_LATE = frozenset({"DeadlineExceededError", "ResourceExhaustedError", "UnavailableError"})
"""What calls end with that cannot be answered in time. Who was refused calls again only while the deadline allows."""


def kill_workers(scene: Harness, seconds: float, rng: Random) -> None:
    """Kills one worker after the other; each request that one held is answered by another, so none meets two kills."""
    for _ in scene.rounds(seconds):
        os.kill(rng.choice(scene.service.workers()), signal.SIGKILL)
        scene.load.wait_for_answers()
        scene.service.wait_until_whole()


def kill_all_workers(scene: Harness, seconds: float, rng: Random) -> None:
    """Kills all workers at once: for a while there is nobody to compute, and then there is again.

    The front is stopped meanwhile, lest it give a request of the first one to the next, to meet its second death there.
    """
    for _ in scene.rounds(seconds):
        workers, front = scene.service.workers(), psutil.Process(scene.service.process.pid)
        front.suspend()
        try:
            wait_until(lambda front=front: front.status() == psutil.STATUS_STOPPED)  # type: ignore[misc]
            for pid in workers:
                os.kill(pid, signal.SIGKILL)
        finally:
            front.resume()
        scene.load.wait_for_answers()
        scene.service.wait_until_whole()


def freeze_a_worker(scene: Harness, seconds: float, rng: Random) -> None:
    """Stops a worker for good: it must be found, killed and replaced, and its requests be answered by another."""
    victim = rng.choice(scene.service.workers())
    os.kill(victim, signal.SIGSTOP)
    scene.load.wait_for_answers()
    wait_until(lambda: not is_running(victim), _FROZEN_TIMEOUT_S)


def freeze_a_worker_for_a_moment(scene: Harness, seconds: float, rng: Random) -> None:
    """Stops a worker and lets it go on before anyone need worry: it must be left alive."""
    workers = scene.service.workers()
    for _ in scene.rounds(seconds):
        victim = rng.choice(workers)
        os.kill(victim, signal.SIGSTOP)
        time.sleep(0.3)
        os.kill(victim, signal.SIGCONT)
        scene.load.wait_for_answers()
    assert scene.service.workers() == workers


def kill_clients(scene: Harness, seconds: float, rng: Random) -> None:
    """Kills client processes amid their calls, of every transport."""
    service = scene.service
    for _ in scene.rounds(seconds):
        with ExitStack() as stack:
            victims = [
                LoadProcess(service, target, kind, scene.load.problems, seed=rng.randrange(2**32))
                for target, kind in zip((service.target, service.unix_target) * 3, _TRANSPORTS, strict=False)
            ]
            for victim in victims:
                stack.callback(victim.close)
                victim.run()
            for victim in rng.sample(victims, len(victims)):
                wait_until(lambda victim=victim: min(victim.answers) > 0)  # type: ignore[misc]
                time.sleep(rng.uniform(0, 0.05))
                victim.process.kill()


def storm_of_deadlines(scene: Harness, seconds: float, rng: Random) -> None:
    """Asks for much with timeouts of 0.1 ms to 20 ms: each call is answered right, ends in time, or is refused."""
    service, seed = scene.service, rng.randrange(2**32)
    ways = ((service.target, "auto"), (service.unix_target, "unary"), (service.target, "stream"))
    storm = [
        LoadProcess(service, *way, scene.load.problems, threads=_STORM_THREADS, timeouts_s=_SHORT_S, seed=seed)
        for way in ways
    ]
    try:
        for caller in storm:
            caller.run()
        for _ in scene.rounds(seconds):
            scene.load.wait_for_answers()
        for caller in storm:
            caller.begin_pause()
        for caller in storm:
            tally = caller.finish_pause()
            assert not (breaches := tally.breaches(_TOO_LATE)), breaches
            assert tally.counts["DeadlineExceededError"] > 0
    finally:
        for caller in storm:
            caller.close()


def kill_the_front(scene: Harness, seconds: float, rng: Random) -> None:
    """Kills the front process: nothing of the server is left, and another can start in its place at once."""
    service = scene.service
    for _ in scene.rounds(seconds):
        files = service.files()
        service.process.kill()
        service.process.wait()
        wait_until(lambda: not service.pids(), _GONE_TIMEOUT_S)
        wait_until(lambda files=files: not any(file.exists() for file in files), _GONE_TIMEOUT_S)  # type: ignore[misc]
        service.start()
        scene.load.wait_for_answers()


def stop_the_server(scene: Harness, seconds: float, rng: Random) -> None:
    """Tells the server to stop: it ends what it has begun, and exits with 0; its successor is found by all clients."""
    service = scene.service
    for _ in scene.rounds(seconds):
        files = service.files()
        service.process.terminate()
        assert service.process.wait(3 * service.drain_timeout_s) == 0
        assert not service.pids()
        assert not [file for file in files if file.exists()]
        service.start()
        scene.load.wait_for_answers()


def stop_the_server_at_once(scene: Harness, seconds: float, rng: Random) -> None:
    """Tells the server twice to stop, while a frozen worker keeps it from draining: it ends without waiting."""
    service = scene.service
    for pid in service.workers():
        os.kill(pid, signal.SIGSTOP)
    with bngrad.Client(service.target) as client:
        wait_until(lambda: client.server_info().requests > 0)
    logged = len(service.log())
    service.process.terminate()
    wait_until(lambda: "draining" in service.log()[logged:])  # of two signals at once only one would be heard
    service.process.terminate()
    assert service.process.wait(_GONE_TIMEOUT_S) == 128 + signal.SIGTERM
    wait_until(lambda: not service.pids(), _GONE_TIMEOUT_S)
    service.start()
    scene.load.wait_for_answers()
