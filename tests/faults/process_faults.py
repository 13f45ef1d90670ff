"""Processes that are killed, frozen and stopped: workers, clients, the front process."""

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

_FROZEN_TIMEOUT_S = 90.0
"""The time within which a frozen worker must be replaced; one that is starting has a minute."""
_GONE_TIMEOUT_S = 20.0
"""The time within which a server must be gone after its front process was killed or got two signals; draining may
take longer."""
_TRANSPORTS = ("auto", "unary", "stream", "shared", "aio")
_STORM_THREADS = 16
_SHORT_S = (0.0001, 0.02)
_TOO_LATE = frozenset({"DeadlineExceededError", "ResourceExhaustedError", "UnavailableError"})
"""The errors of calls that cannot be answered in time; refused calls are retried only before their deadline."""


def kill_workers(scene: Harness, seconds: float, rng: Random) -> None:
    """Kills one worker after the other, waiting in between, so that no request meets two kills."""
    for _ in scene.rounds(seconds):
        scene.service.kill_a_worker(rng)
        scene.load.wait_for_answers()
        scene.service.wait_until_whole()


def kill_all_workers(scene: Harness, seconds: float, rng: Random) -> None:
    """Kills all workers at once, so that none is left for a while.

    The front process is stopped meanwhile: otherwise it might pass a dead worker's request on to the next one killed.
    """
    for _ in scene.rounds(seconds):
        front = psutil.Process(scene.service.process.pid)
        front.suspend()
        try:
            wait_until(lambda front=front: front.status() == psutil.STATUS_STOPPED)  # type: ignore[misc]
            for pid in scene.service.workers():
                os.kill(pid, signal.SIGKILL)
        finally:
            front.resume()
        scene.load.wait_for_answers()
        scene.service.wait_until_whole()


def freeze_a_worker(scene: Harness, seconds: float, rng: Random) -> None:
    """Stops a worker for good: it must be detected, killed and replaced, and its requests answered by another."""
    victim = rng.choice(scene.service.workers())
    os.kill(victim, signal.SIGSTOP)
    scene.load.wait_for_answers()
    wait_until(lambda: not is_running(victim), _FROZEN_TIMEOUT_S)


def freeze_a_worker_briefly(scene: Harness, seconds: float, rng: Random) -> None:
    """Stops a worker for a moment: it must be left alive."""
    workers = scene.service.workers()
    for _ in scene.rounds(seconds):
        victim = rng.choice(workers)
        os.kill(victim, signal.SIGSTOP)
        time.sleep(0.3)
        os.kill(victim, signal.SIGCONT)
        scene.load.wait_for_answers()
    assert scene.service.workers() == workers


def kill_clients(scene: Harness, seconds: float, rng: Random) -> None:
    """Kills client processes of every transport during their calls."""
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
    """Makes many calls with timeouts of 0.1 ms to 20 ms: each is answered right, times out, or is refused."""
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


def kill_the_front_process(scene: Harness, seconds: float, rng: Random) -> None:
    """Kills the front process: nothing of the server must be left, and another can start on its addresses at once."""
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
    """Sends SIGTERM: the server finishes its requests and exits with 0; all clients find its successor."""
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
    """Sends SIGTERM twice while frozen workers keep the server from draining: it ends without waiting."""
    service = scene.service
    for pid in service.workers():
        os.kill(pid, signal.SIGSTOP)
    time.sleep(0.5)  # by then every caller has sent a request that the front process does not compute itself
    with service.client() as client:
        wait_until(lambda: client.server_info().requests > 0)
    logged = len(service.log())
    service.process.terminate()
    wait_until(lambda: "draining" in service.log()[logged:])
    time.sleep(0.2)  # two signals at once are one
    service.process.terminate()
    assert service.process.wait(_GONE_TIMEOUT_S) == 128 + signal.SIGTERM
    wait_until(lambda: not service.pids(), _GONE_TIMEOUT_S)
    service.start()
    scene.load.wait_for_answers()
