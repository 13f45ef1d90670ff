"""A machine that has run out of a resource, or whose clock is changed."""

from __future__ import annotations

import os
import resource
import struct
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random

import psutil
from tests.faults.harness import Harness
from tests.raw_http2 import RawConnection

HOUR_S = 3600.0
_SPARE_DESCRIPTORS = 16
_CLOCK_SOURCE = Path(__file__).with_name("clock.c")
_FILL = """
import os, sys, time
with open("/dev/shm/filler", "wb", buffering=0) as file:
    os.unlink("/dev/shm/filler")
    for size in (4096, 1):
        try:
            while True:
                file.write(bytes(size))
        except OSError as error:
            print(error.strerror, flush=True)
    sys.stdin.read()
"""


def exhaust_descriptors(scene: Harness, seconds: float, rng: Random) -> None:
    """Limits the front process's descriptors, takes them all, kills a worker meanwhile, and releases them."""
    service = scene.service
    front, addresses = service.process.pid, list(service.addresses().values())
    soft, hard = resource.prlimit(front, resource.RLIMIT_NOFILE)
    limit = psutil.Process(front).num_fds() + _SPARE_DESCRIPTORS
    resource.prlimit(front, resource.RLIMIT_NOFILE, (limit, hard))
    try:
        with ExitStack() as stack:
            for number in range(4 * _SPARE_DESCRIPTORS):
                with suppress(OSError):
                    stack.enter_context(RawConnection(addresses[number % len(addresses)]))
            service.kill_a_worker(rng)
            time.sleep(seconds)
        service.wait_until_whole()
        scene.load.wait_for_answers()
    finally:
        resource.prlimit(front, resource.RLIMIT_NOFILE, (soft, hard))


def set_the_clock(scene: Harness, seconds: float, rng: Random) -> None:
    """Sets the wall clock of the server's processes an hour forward and back, repeatedly."""
    try:
        for _ in scene.rounds(seconds):
            for shift_s in (HOUR_S, -HOUR_S, 0.0):
                set_clock(scene.clock, shift_s)
                scene.load.wait_for_answers()
    finally:
        set_clock(scene.clock, 0.0)


def fill_shared_memory(scene: Harness, seconds: float, rng: Random) -> None:
    """Fills the server's private /dev/shm to the last byte."""
    assert scene.service.inside(), "the machine's own /dev/shm is not to be filled"
    command = [*scene.service.inside(), sys.executable, "-c", _FILL]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as filler:
        assert filler.stdout is not None
        assert [filler.stdout.readline() for _ in range(2)] == ["No space left on device\n"] * 2
        for _ in scene.rounds(seconds):
            scene.load.wait_for_answers()


def shiftable_clock(directory: Path) -> tuple[Path, dict[str, str]]:
    """Builds a wall clock that tests can set: the file that sets it, and the environment of processes that use it."""
    library, clock = directory / "clock.so", directory / "clock"
    command = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-O2", "-o", str(library), str(_CLOCK_SOURCE)]
    subprocess.run(command, check=True)
    set_clock(clock, 0.0)
    return clock, {"LD_PRELOAD": str(library), "BNGRAD_TEST_CLOCK": str(clock)}


def set_clock(clock: Path, shift_s: float) -> None:
    """Shifts the wall clock of the processes that use it by this many seconds."""
    with clock.open("r+b" if clock.exists() else "wb") as file:
        file.write(struct.pack("d", shift_s))
