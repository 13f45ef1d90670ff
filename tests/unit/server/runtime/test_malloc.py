"""Free memory goes back to the system, and little time is spent where there is none."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest

from bngrad_server.runtime import malloc

_SCRIPT = """
import ctypes, itertools, json, sys, time
from bngrad_server.runtime import malloc

malloc._LOOK_S, malloc._MAX_WAIT_S = float(sys.argv[1]), 0.64
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_size_t,), (ctypes.c_void_p,)
malloc.set_up_heap()
trims = []
malloc_trim = malloc._LIBC.malloc_trim
malloc._LIBC.malloc_trim = lambda pad: (trims.append(time.monotonic()), malloc_trim(pad))
requests, ended = 0, itertools.repeat(0)
idle = []
trimmer = malloc.MemoryTrimmer(lambda: requests, lambda: next(ended), lambda: idle.append(1))
at_first = malloc._own_nbytes()

def take():
    blocks = [libc.malloc(50_000) for _ in range(2_001)]
    for block in blocks:
        ctypes.memset(block, 1, 50_000)
    return blocks[:-1], blocks[-1]  # the last one, at the top of the heap, keeps the others from being returned at once

def kept_mib():
    return (malloc._own_nbytes() - at_first) / 2**20

"""

_RETURNED = """
blocks, top = take()
while len(trims) < 2:  # in vain: nothing is free yet
    time.sleep(0.01)
held = kept_mib()
in_vain = len(trims)
for block in blocks:
    libc.free(block)
deadline = time.monotonic() + 30
while kept_mib() > 16 and time.monotonic() < deadline:
    time.sleep(0.01)
print(json.dumps([held, len(trims) - in_vain, kept_mib()]))
"""

_EARLY = """
blocks, top = take()
held = kept_mib()
for block in blocks:
    libc.free(block)
deadline = time.monotonic() + 30
while kept_mib() > 16 and time.monotonic() < deadline:
    time.sleep(0.01)
print(json.dumps([held, kept_mib()]))
"""

_RARE = """
time.sleep(1)
before = len(trims)
blocks, top = take()
time.sleep(3)
print(json.dumps([before, len(trims)]))
"""

_BUSY = """
requests = 1
blocks, top = take()
for block in blocks:
    libc.free(block)
time.sleep(1)
busy = len(trims)
requests = 0
deadline = time.monotonic() + 30
while kept_mib() > 16 and time.monotonic() < deadline:
    time.sleep(0.01)
print(json.dumps([busy, kept_mib()]))
"""

_IDLE = """
time.sleep(0.5)
quiet, requests = len(idle), 1
time.sleep(0.2)
before = len(idle)
time.sleep(0.5)
busy, ended, requests = len(idle) - before, itertools.count(1), 0  # at each look there are more
time.sleep(0.2)
before = len(idle)
time.sleep(0.5)
print(json.dumps([quiet, busy, len(idle) - before]))
"""

_STEADY = """
ended = itertools.count(1)  # at each look there are more
began = time.monotonic()
blocks, top = take()
for block in blocks:
    libc.free(block)
deadline = time.monotonic() + 30
while kept_mib() > 16 and time.monotonic() < deadline:
    time.sleep(0.01)
print(json.dumps([trims[0] - began, kept_mib()]))
"""


_REUSED = """
import resource

def take_and_free():
    for _ in range(4):
        blocks = [libc.malloc(nbytes) for nbytes in (500_000, 300_000, 300_000)]
        for block in blocks:
            ctypes.memset(block, 1, 300_000)
        for block in blocks:
            libc.free(block)

trimmer.close()
take_and_free()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
take_and_free()
print(json.dumps([resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before]))
"""


def test_what_messages_leave_free_is_used_by_the_next_ones() -> None:
    """Without the thresholds, each takes all its pages anew from the system."""
    (faults,) = run(_REUSED)
    assert faults < 100


def test_what_connections_held_is_returned_after_trims_in_vain() -> None:
    held, trims, at_last = run(_RETURNED)
    assert held > 90
    assert trims
    assert at_last <= 16


def test_what_requests_left_before_the_first_look_is_returned() -> None:
    """A look that took the process's memory of that moment for its least would never trim."""
    held, at_last = run(_EARLY, look_s=0.5)
    assert held > 90
    assert at_last <= 16


def test_no_trim_runs_without_growth_and_few_where_nothing_is_free() -> None:
    """Each stops all threads that want memory. Without longer waits there would be 150."""
    before, after = run(_RARE)
    assert before == 0
    assert 2 <= after <= 12


def test_other_memory_is_returned_at_each_look_while_there_is_no_request() -> None:
    quiet, busy, steady = run(_IDLE)
    assert quiet > 0
    assert (busy, steady) == (0, 0)


def test_requests_are_not_disturbed_by_a_trim() -> None:
    busy, kept = run(_BUSY)
    assert busy == 0
    assert kept <= 16


def test_a_trim_waits_for_a_moment_without_requests_but_not_for_ever() -> None:
    waited_s, kept = run(_STEADY)
    assert waited_s >= 0.3
    assert kept <= 16


def run(script: str, look_s: float = 0.02) -> list[float]:
    """Runs a script after the common one in a process of its own, and returns the numbers that it prints."""
    command = [sys.executable, "-c", _SCRIPT + script, str(look_s)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    numbers: list[float] = json.loads(done.stdout)
    return numbers


def test_the_thread_outlives_a_look_that_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(malloc, "_LOOK_S", 0.01)
    errors, looks_again = iter([KeyError(), OSError()]), threading.Event()

    def requests_ended() -> int:
        for error in errors:
            raise error
        looks_again.set()
        return 0

    trimmer = malloc.MemoryTrimmer(lambda: 0, requests_ended)
    assert looks_again.wait(30)
    trimmer.close()
    assert [each.message for each in caplog.records] == ["a look for memory to return failed"]
