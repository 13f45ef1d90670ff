"""The order of jobs, from clients that are named by letters."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bngrad_kernels.spec import BFLOAT16, FLOAT32, Spec
from bngrad_server.memory.layout import Place, Task
from bngrad_server.scheduling.fair_queue import FairQueue
from bngrad_server.scheduling.job import Job, KernelKey

MB = 10**6
SPEC = Spec(FLOAT32, (2, 3, 3, 4), channel_axis=3)
TASK = Task(True, 0, (Place(0, 0),) * 3)
KEYS: list[KernelKey] = [(FLOAT32, True, True, 1), (BFLOAT16, True, True, 1)]


def job(client: str = "a", nbytes: int = 100, key: int = 0, priority: int = 0) -> Job:
    return Job(
        SPEC, TASK, nbytes, KEYS[key], client=client, priority=priority, deadline=None, is_abandoned=lambda: False
    )


def batches(queue: FairQueue) -> list[list[Job]]:
    return [queue.take() for _ in iter(lambda: len(queue), 0)]


@dataclass(frozen=True)
class Case:
    jobs: list[Job]
    batches: list[list[int]]


CASES = {
    "one kernel a batch": Case([job(key=key) for key in (0, 1, 0, 1)], [[0, 2], [1, 3]]),
    "limited in jobs": Case([job() for _ in range(12)], [[*range(10)], [10, 11]]),
    "full once its bytes suffice": Case([job(nbytes=125) for _ in range(9)], [[*range(8)], [8]]),
    "a large one is computed alone": Case([job("a", 126), job("b", 125), job("c", 125)], [[1, 2], [0]]),
    "a large one ends a batch of small ones": Case([job("a", 126), job("b", 127), job("a", 5)], [[0], [1], [2]]),
    "first come first": Case([job(nbytes=500) for _ in range(3)], [[0], [1], [2]]),
    "a small one before a large one": Case([job(nbytes=5 * MB), job(nbytes=MB)], [[1], [0]]),
    "but not before one as small": Case([job(nbytes=2 * MB), job(nbytes=MB)], [[0], [1]]),
    "clients in turns": Case([job(client, MB) for client in "aaabb"], [[0], [3], [1], [4], [2]]),
    "priority first": Case([job(nbytes=MB), job(nbytes=MB, priority=1)], [[1], [0]]),
    "negative priority last": Case([job(nbytes=MB, priority=-1), job(nbytes=MB)], [[1], [0]]),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_order_is_that_of_the_ranks(case: Case) -> None:
    queue = FairQueue(max_jobs=10, max_bytes=1000)
    for each in case.jobs:
        queue.put(each)
    assert batches(queue) == [[case.jobs[i] for i in batch] for batch in case.batches]


def test_no_priority_puts_a_job_off_for_ever() -> None:
    queue = FairQueue(max_jobs=1, max_bytes=1000)
    least = job(nbytes=MB, priority=-8)
    queue.put(least)
    queue.put(job("b", MB, priority=8))
    rounds = 0
    while queue.take() != [least]:
        queue.put(job("b", MB, priority=8))
        rounds += 1
    assert rounds < 16 * 2**24 / MB + 4


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 40 * MB), st.integers(0, 1), st.integers(-8, 8)), min_size=1
    ),
    st.integers(0, 60 * MB),
)
def test_a_job_has_its_turn_whatever_keeps_coming(others: list[tuple[str, int, int, int]], nbytes: int) -> None:
    """Others come faster than they are taken, each time from clients of any kind, also new ones."""
    queue = FairQueue(max_jobs=4, max_bytes=8 * MB)
    own = job("own", nbytes)
    queue.put(own)
    work, numbers = 0, itertools.count()
    for client, size, key, priority in itertools.cycle(others):
        queue.put(job(client, size, key, priority))
        queue.put(job(f"new {next(numbers)}", 100, key, priority))
        batch = queue.take()
        if own in batch:
            break
        work += sum(each.nbytes + 2**18 for each in batch)
        # At most one client waits for each round so far: more jobs come than are taken.
        assert work < 64 * (nbytes + 40 * MB + 16 * 2**24) * len(others)


@given(st.lists(st.integers(1, 4 * MB), min_size=40, max_size=80), st.lists(st.integers(1, 4 * MB), min_size=40))
def test_two_clients_that_wait_get_even_shares(first: list[int], second: list[int]) -> None:
    queue = FairQueue(max_jobs=1, max_bytes=1000)
    for nbytes in first:
        queue.put(job("a", nbytes))
    for nbytes in second:
        queue.put(job("b", nbytes))
    work = {"a": 0, "b": 0}
    waiting = {"a": len(first), "b": len(second)}
    while all(waiting.values()):
        (taken,) = queue.take()
        waiting[taken.client] -= 1
        work[taken.client] += taken.nbytes + 2**18
        assert abs(work["a"] - work["b"]) <= 4 * (4 * MB + 2**18)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2000), st.integers(0, 1)), max_size=60), st.data())
def test_every_job_is_taken_once_in_batches_within_the_limits(
    jobs: list[tuple[str, int, int]], data: st.DataObject
) -> None:
    queue, waiting = FairQueue(max_jobs=5, max_bytes=1000), set[Job]()
    for client, nbytes, key in jobs:
        each = job(client, nbytes, key)
        queue.put(each)
        waiting.add(each)
        match data.draw(st.sampled_from(["put", "take", "remove", "put back"])):
            case "take":
                waiting -= set(queue.take())
            case "remove":
                queue.remove(each)
                waiting.remove(each)
            case "put back":
                for taken in queue.take():
                    taken.attempts = 1
                    queue.put_back(taken)
    for batch in batches(queue):
        assert len({each.kernel_key for each in batch}) == 1
        assert len(batch) <= 5
        assert len(batch) == 1 or all(each.nbytes <= 125 and not each.attempts for each in batch)
        assert sum(each.nbytes for each in batch[:-1]) < 1000
        assert set(batch) <= waiting
        waiting -= set(batch)
    assert not waiting


@pytest.mark.parametrize("leave", [lambda queue, _: queue.take(), FairQueue.remove], ids=["taken", "removed"])
def test_clients_that_have_gone_are_forgotten(leave: Callable[[FairQueue, Job], object]) -> None:
    queue, first = FairQueue(8, 1000), job(client="first")
    queue.put(first)
    queue.take()
    for number in range(5000):
        queue.put(each := job(client=str(number)))
        leave(queue, each)
    assert len(queue._clients) < 2000
    queue.put_back(first)  # its worker has died
    assert queue.take() == [first]


def test_a_client_that_had_nothing_to_do_has_no_more_than_its_share_later() -> None:
    queue = FairQueue(max_jobs=1, max_bytes=1000)
    for _ in range(10):
        queue.put(job("a", MB))
        queue.take()
    jobs = [job(client, MB) for client in "bbbaaa"]
    for each in jobs:
        queue.put(each)
    assert batches(queue) == [[jobs[i]] for i in (0, 3, 1, 4, 2, 5)]


def test_each_job_of_a_batch_counts_as_work() -> None:
    queue = FairQueue(max_jobs=10, max_bytes=1000)
    for _ in range(10):
        queue.put(job("a"))
    assert len(queue.take()) == 10
    jobs = [job("a", key=0), job("b", key=1)]
    for each in jobs:
        queue.put(each)
    assert batches(queue) == [[each] for each in jobs]


def test_a_new_client_begins_with_half_a_share_of_what_one_of_two_has_had() -> None:
    queue = FairQueue(max_jobs=1, max_bytes=1000)
    jobs = [job(client, MB) for client in "abac"]
    for each in jobs[:2]:
        queue.put(each)
    assert queue.take() == jobs[:1]
    for each in jobs[2:]:
        queue.put(each)
    assert batches(queue) == [[jobs[i]] for i in (1, 3, 2)]
