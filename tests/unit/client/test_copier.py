"""The copies of large arrays by two threads."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.servers import wait_until
from tests.unit.client.calls import START_THREAD, interrupt_after

from bngrad._shared_memory.copier import Copier
from bngrad.typing import Array

MIB = 2**20
SECONDS = 30.0
SIZES = [[0], [4], [MIB, MIB], [4 * MIB], [4 * MIB + 4, 4], [5 * MIB - 4, 3 * MIB + 8], [9 * MIB] * 3, [24 * MIB]]


@pytest.fixture
def copier() -> Iterator[Copier]:
    with closing(Copier()) as copier:
        yield copier


def pair(nbytes: int, dtype: Any = np.uint8, seed: int = 0) -> tuple[Array, Array]:
    source = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8).view(dtype)
    return np.zeros_like(source), source


def helpers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "bngrad-copy"]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_byte_is_copied(copier: Copier, sizes: list[int], dtype: Any) -> None:
    pairs = [pair(nbytes, dtype, seed) for seed, nbytes in enumerate(sizes)]
    for _ in range(3):
        copier.copy(pairs)
        for target, source in pairs:
            assert target.tobytes() == source.tobytes()
            target[...] = 0


def test_arrays_have_any_number_of_dimensions(copier: Copier) -> None:
    target, source = (array.reshape(2, 4, 2, -1) for array in pair(8 * MIB, np.float32))
    source.flags.writeable = False
    copier.copy([(target, source)])
    assert target.tobytes() == source.tobytes()


def test_threads_copy_at_the_same_time(copier: Copier) -> None:
    pairs = [[pair(5 * MIB, seed=2 * i + j) for j in range(2)] for i in range(8)]
    with ThreadPoolExecutor(len(pairs)) as threads:
        for _ in range(5):
            list(threads.map(copier.copy, pairs))
            for target, source in (each for both in pairs for each in both):
                assert target.tobytes() == source.tobytes()
                target[...] = 0


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "no thread"])
def test_the_caller_copies_alone_without_a_second_thread(
    copier: Copier, is_closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    if is_closed:
        copier.close()
    monkeypatch.setattr(threading.Thread, "start", fail)
    target, source = pair(8 * MIB)
    copier.copy([(target, source)])
    assert target.tobytes() == source.tobytes()
    assert copier._queue.qsize() == is_closed  # what tells a thread to end


def test_an_interrupt_while_the_thread_starts_leads_to_no_other_one(copier: Copier) -> None:
    before = set(helpers())
    with interrupt_after(START_THREAD, module="threading"):
        copier.copy([pair(8 * MIB)])
    (helper,) = set(helpers()) - before
    wait_until(helper.is_alive)
    copier.copy([pair(8 * MIB)])
    assert set(helpers()) - before == {helper}


def test_a_failure_of_the_caller_waits_for_the_second_thread(copier: Copier, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = threading.Event(), threading.Event()

    def fail(target: Array, source: Array) -> None:
        if threading.current_thread().name == "bngrad-copy":
            begun.set()
            time.sleep(0.05)
            ended.set()
        else:
            assert begun.wait(SECONDS)
            raise MemoryError

    monkeypatch.setattr(np, "copyto", fail)
    with pytest.raises(MemoryError):
        copier.copy([pair(8 * MIB)])
    assert ended.is_set()


@pytest.mark.parametrize("moment", ["first", "later"])
def test_the_caller_may_have_one_core(copier: Copier, moment: str) -> None:
    """Then there is none to keep the other thread on."""
    if moment == "later":
        copier.copy([pair(8 * MIB)])
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        for _ in range(2):
            target, source = pair(8 * MIB)
            copier._core = -1
            copier.copy([(target, source)])
            assert target.tobytes() == source.tobytes()
    finally:
        os.sched_setaffinity(0, cores)


def test_a_failure_of_the_second_thread_is_raised(copier: Copier, monkeypatch: pytest.MonkeyPatch) -> None:
    copyto, failed = np.copyto, threading.Event()

    def fail(target: Array, source: Array) -> None:
        if threading.current_thread().name == "bngrad-copy":
            failed.set()
            raise MemoryError
        assert failed.wait(SECONDS)
        copyto(target, source)

    pairs = [pair(4 * MIB) for _ in range(2)]
    with monkeypatch.context() as patches:
        patches.setattr(np, "copyto", fail)
        with pytest.raises(MemoryError) as raised:
            copier.copy(pairs)
    assert "help" not in [entry.name for entry in raised.traceback]  # whose frame refers to the arrays
    copier.copy(pairs)
    assert all(target.tobytes() == source.tobytes() for target, source in pairs)


def test_the_thread_ends_with_the_copier() -> None:
    before = set(helpers())
    copier = Copier()
    copier.copy([pair(8 * MIB)])
    (helper,) = set(helpers()) - before
    del copier
    gc.collect()
    helper.join(SECONDS)
    assert not helper.is_alive()


def test_no_array_is_kept(copier: Copier) -> None:
    ended = threading.Event()
    target, source = pair(8 * MIB)
    weakref.finalize(target, ended.set)
    copier.copy([(target, source)])
    del target
    assert ended.wait(SECONDS)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_the_thread_runs_on_other_cores_than_the_caller(copier: Copier) -> None:
    others = helpers()
    copier.copy([pair(8 * MIB)])
    (helper,) = (thread for thread in helpers() if thread not in others)
    assert len(os.sched_getaffinity(helper.native_id or 0)) == len(os.sched_getaffinity(0)) - 1
