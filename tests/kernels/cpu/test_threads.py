"""The threads that compute kernels."""

from __future__ import annotations

import ctypes
import functools
import gc
import math
import os
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.kernels.cpu import fixed_bits
from tests.kernels.problems import ORDERS, random_problem, spec_of

from bngrad_kernels import backends
from bngrad_kernels.cpu import backend
from bngrad_kernels.cpu.machine_code.loader import LoadedKernel
from bngrad_kernels.cpu.threads import Team

core_of_caller = ctypes.PyDLL(None).sched_getcpu
PROBLEMS = range(100)
NEVER = math.inf


class Arriving(Team):
    """A team whose helpers come some seconds late, or never."""

    def __init__(self, delays_s: Sequence[float]) -> None:
        super().__init__()
        self._delays_s = delays_s

    def help(self, kernel: LoadedKernel, member: int) -> None:
        if (delay_s := self._delays_s[member - 1]) < NEVER:
            time.sleep(delay_s)
            super().help(kernel, member)


class Observed(Team):
    """A team that notes for each call whether its helper may run on the caller's core alone."""

    def __init__(self) -> None:
        super().__init__()
        self.shared: list[bool] = []

    def run(self, kernel: LoadedKernel, task: bytes, threads: int) -> None:
        def join(*arguments: int) -> None:
            helper = self._helpers[0].native_id or 0
            self.shared.append(os.sched_getaffinity(helper) == {core_of_caller()})
            kernel.join(*arguments)

        super().run(kernel._replace(join=join), task, threads)


@pytest.fixture
def helpers(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The helpers of a team of the test's own."""
    team = Team()
    monkeypatch.setattr(backend, "team", lambda: team)
    monkeypatch.setattr(backend, "ALONE_BELOW_NBYTES", 0)
    return team._helpers


def test_without_more_threads_one_computes_the_same_bits(
    helpers: list[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert_bits(3)
    assert not helpers


@pytest.mark.parametrize("count", [2, 3, 8, 100])
def test_any_number_of_threads_computes_the_same_bits(count: int, helpers: list[threading.Thread]) -> None:
    assert_bits(count)
    assert 1 <= len(helpers) < count


@pytest.mark.parametrize("delays_s", [(0.001, 0.003), (0, NEVER), (NEVER, NEVER)], ids=["late", "one never", "never"])
@pytest.mark.parametrize("alone_below_nbytes", [0, 2**16], ids=["divided", "mixed"])
def test_helpers_that_come_late_or_never_keep_no_one_waiting(
    alone_below_nbytes: int, delays_s: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "ALONE_BELOW_NBYTES", alone_below_nbytes)
    monkeypatch.setattr(backend, "team", functools.cache(lambda: Arriving(delays_s)))
    assert_bits(1 + len(delays_s))


def test_an_interrupt_while_helpers_start_makes_no_two_of_one_number(
    helpers: list[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def interrupted(self: threading.Thread) -> None:
        start(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            assert_bits(3)
    assert_bits(3)
    assert [helper.name for helper in helpers] == ["bngrad-kernel-1", "bngrad-kernel-2"]


@pytest.mark.usefixtures("helpers")
def test_one_team_serves_backends_of_any_size_and_all_threads_that_call_them() -> None:
    computing = [backends.create("cpu", threads=count) for count in (2, 3, 5, 16)]
    expected = fixed_bits.expected()

    def call(seed: int) -> None:
        chosen = random.Random(seed)
        for _ in range(200):
            number = chosen.choice(PROBLEMS)
            assert fixed_bits.digest(number, chosen.choice(computing)) == expected[number]

    with ThreadPoolExecutor(3) as callers:
        list(callers.map(call, range(3)))


@pytest.mark.usefixtures("helpers")
def test_helpers_sleep_in_kernels_whose_backends_have_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A helper that has computed the small problem sleeps until the large one is done, and longer."""
    batches = [[random_problem(spec_of(order, (outer, 64, 200))) for outer in (1, 100)] for order in ORDERS]
    monkeypatch.setattr(backend, "ALONE_BELOW_NBYTES", sum(problem.tensor_nbytes for problem in batches[0]))
    gc.freeze()  # what other tests have left need not be searched each time
    for i in range(100):
        backends.create("cpu", threads=2).run(batches[i % 2][:: 1 if i % 4 < 2 else -1])
        gc.collect()
    gc.unfreeze()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_helpers_run_on_other_cores_than_the_caller_also_when_it_has_just_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where all cores are busy, Linux would keep waking them where they cannot help."""
    team = Observed()
    monkeypatch.setattr(backend, "team", lambda: team)
    monkeypatch.setattr(backend, "ALONE_BELOW_NBYTES", 0)
    computing, problem = backends.create("cpu", threads=2), random_problem(spec_of(1, (20_000, 64, 1)))
    cores = sorted(os.sched_getaffinity(0))[:2]

    def call() -> None:
        for i in range(20):
            os.sched_setaffinity(0, {cores[i % 2]})
            os.sched_setaffinity(0, cores)  # Linux leaves the thread where it is, mostly
            computing.run([problem])

    with ThreadPoolExecutor(1) as caller:
        caller.submit(call).result()
    assert len(team.shared) == 20
    assert sum(team.shared) < 10


def assert_bits(count: int) -> None:
    """Computes problems with this many threads, alone and in a batch."""
    computing, expected = backends.create("cpu", threads=count), fixed_bits.expected()[: len(PROBLEMS)]
    assert [fixed_bits.digest(number, computing) for number in PROBLEMS] == expected
    assert fixed_bits.digests(PROBLEMS, computing) == expected
