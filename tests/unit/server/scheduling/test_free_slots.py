"""Workers that compute several batches at once, and what happens to all of them when such a worker dies."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from typing import TypeAlias

import pytest
from tests.unit.server.scheduling.workers import (
    LARGE,
    SPEC,
    TIMEOUT_S,
    GatedWorker,
    Requests,
    job,
    large_job,
    wait_for,
    wait_until,
)

from bngrad_kernels.spec import Spec
from bngrad_server.errors import ComputeError
from bngrad_server.memory.layout import ARENA, Place, Task
from bngrad_server.scheduling.batcher import Batcher
from bngrad_server.scheduling.free_slots import FreeSlots
from bngrad_server.scheduling.job import Job

Outcome: TypeAlias = Future[list[str | None]]

NEAR = Task(True, 0, (Place(ARENA, 0), Place(ARENA, 256, ahead=7), Place(ARENA, 512)))
"""With an input of which a worker may have a copy."""


@pytest.fixture
def requests() -> Iterator[Requests]:
    requests = Requests(Batcher(max_jobs=3, max_bytes=4 * job().nbytes))  # so none is brief
    yield requests
    requests.end()


@pytest.fixture
def brief_requests() -> Iterator[Requests]:
    requests = Requests(Batcher(max_jobs=3, max_bytes=40 * job().nbytes))
    yield requests
    requests.end()


def begin(requests: Requests, only: Job, *workers: GatedWorker) -> tuple[Future[None], GatedWorker, Outcome]:
    """Runs a job that one of the workers must begin at once; returns that one as well."""
    (future,) = requests.run(only)
    wait_until(lambda: not all(worker.is_untouched for worker in workers))
    worker = next(worker for worker in workers if not worker.is_untouched)
    batch, outcome = worker.next_batch()
    assert batch == [only]
    return future, worker, outcome


def test_a_worker_begins_as_many_batches_as_it_has_slots_and_ends_them_in_any_order(requests: Requests) -> None:
    worker = requests.offer(slots=2)
    first, _, first_outcome = begin(requests, job(), worker)
    second, _, second_outcome = begin(requests, job(), worker)
    (third,) = requests.run(waiting := job())
    assert worker.is_untouched
    second_outcome.set_result([None])
    second.result(TIMEOUT_S)
    assert worker.compute() == [waiting]
    third.result(TIMEOUT_S)
    first_outcome.set_result([None])
    first.result(TIMEOUT_S)
    wait_until(lambda: list(requests.batcher._free) == [worker] * 2)


def test_small_jobs_wait_for_a_brief_batch_and_share_the_next_one(brief_requests: Requests) -> None:
    worker = brief_requests.offer(slots=2)
    first, _, outcome = begin(brief_requests, job(), worker)
    futures = brief_requests.run(*(waiting := [job(), job()]))
    assert worker.is_untouched
    assert list(brief_requests.batcher._free) == [worker]
    outcome.set_result([None])
    assert worker.compute() == waiting
    wait_for([first, *futures])
    wait_until(lambda: list(brief_requests.batcher._free) == [worker] * 2)


def test_a_large_job_does_not_wait_for_a_brief_batch_nor_a_small_one_for_a_large_batch(
    brief_requests: Requests,
) -> None:
    worker = brief_requests.offer(slots=2)
    brief, _, brief_outcome = begin(brief_requests, job(), worker)
    large, _, large_outcome = begin(brief_requests, job(nbytes=1000), worker)
    brief_outcome.set_result([None])
    brief.result(TIMEOUT_S)
    second, _, second_outcome = begin(brief_requests, job(), worker)
    for future, outcome in ((second, second_outcome), (large, large_outcome)):
        outcome.set_result([None])
        future.result(TIMEOUT_S)


def test_both_slots_are_dealt_out_again_when_a_brief_batch_has_ended() -> None:
    batcher, worker = Batcher(max_jobs=3, max_bytes=40 * job().nbytes), GatedWorker(slots=2)
    first, *waiting = job(0), job(1), job(2)  # no two share a batch
    for _ in range(2):
        batcher.offer(worker)
    batcher.enter(first)
    batch = batcher.next_batch(first)
    assert batch is not None
    for each in waiting:
        batcher.enter(each)
    assert [each.worker for each in waiting] == [None, None]
    batcher.end_batch(batch, first)
    assert batcher.next_batch(first) is None
    assert [each.worker for each in waiting] == [worker, worker]


def test_a_slot_that_becomes_free_amid_a_brief_batch_is_kept_while_a_small_job_comes_first() -> None:
    batcher, worker = Batcher(max_jobs=3, max_bytes=40 * job().nbytes), GatedWorker(slots=2)
    running, waiting = [job(0), job(1, nbytes=1000)], [job(2), job(1, nbytes=1000)]
    batches = []
    for each in running:
        batcher.offer(worker)
        batcher.enter(each)
        batches.append(batcher.next_batch(each))
    for each in waiting:
        batcher.enter(each)
    for each, batch in reversed(list(zip(running, batches, strict=True))):
        assert [waiter.worker for waiter in waiting] == [None, None]
        assert batch is not None
        batcher.end_batch(batch, each)
        assert batcher.next_batch(each) is None
    assert [waiter.worker for waiter in waiting] == [worker, worker]


def test_no_worker_of_a_brief_batch_that_is_split_begins_another() -> None:
    batcher, split, small = Batcher(max_jobs=3, max_bytes=2**24), job(spec=LARGE, nbytes=2**21), job()
    for worker in [GatedWorker(slots=2), GatedWorker(slots=2)] * 2:
        batcher.offer(worker)
    batcher.enter(split)
    batch = batcher.next_batch(split)
    assert batch is not None
    assert len(batch.workers) == 2
    batcher.enter(small)
    assert small.worker is None
    batcher.end_batch(batch, split)
    assert small.worker in batch.workers


def test_a_slot_that_is_taken_for_a_large_job_goes_to_what_comes_first(brief_requests: Requests) -> None:
    worker = brief_requests.offer(slots=2)
    first, _, outcome = begin(brief_requests, job(), worker)
    futures = brief_requests.run(small := job(), large := job(key=1, nbytes=1000))
    assert worker.compute() == [small]
    outcome.set_result([None])
    assert worker.compute() == [large]
    wait_for([first, *futures])
    wait_until(lambda: list(brief_requests.batcher._free) == [worker] * 2)


def test_small_jobs_go_on_when_a_worker_has_died_of_a_brief_batch(brief_requests: Requests) -> None:
    worker = brief_requests.offer(slots=2)
    first, _, outcome = begin(brief_requests, lost := job(), worker)
    (second,) = brief_requests.run(waiting := job())
    worker.die_with(outcome)
    wait_until(lambda: brief_requests.batcher.waiting()[0] == 2)
    successor = brief_requests.offer(slots=2)
    for each in ([lost], [waiting]):
        assert successor.compute() == each
    wait_for([first, second])
    assert not successor.killed
    begin(brief_requests, job(), successor)[2].set_result([None])


def test_a_worker_that_is_idle_is_preferred_to_one_that_has_a_free_slot(requests: Requests) -> None:
    workers = [requests.offer(slots=2), requests.offer(slots=2)]
    begun = [begin(requests, job(), *workers) for _ in range(4)]
    assert {worker for _, worker, _ in begun[:2]} == {worker for _, worker, _ in begun[2:]} == set(workers)
    for future, _, outcome in begun:
        outcome.set_result([None])
        future.result(TIMEOUT_S)


def test_a_worker_that_has_a_copy_of_the_input_is_preferred_to_one_that_is_idle(requests: Requests) -> None:
    near, other = workers = [requests.offer(slots=2), requests.offer(slots=2)]
    near.copies = {7}
    begun = [begin(requests, job(task=NEAR), *workers) for _ in range(3)]
    assert [worker for _, worker, _ in begun] == [near, near, other]
    for future, _, outcome in begun:
        outcome.set_result([None])
        future.result(TIMEOUT_S)


def test_a_copy_draws_no_job_to_a_busy_worker_while_one_waits_that_may_have_cost_another() -> None:
    free, near, idle = FreeSlots(1, split=True), GatedWorker(slots=2), GatedWorker()
    near.copies = {7}
    free.add([near, idle])
    free.suspects.add(job())
    assert [free.take(job(task=NEAR)) for _ in range(2)] == [idle, None]


def test_a_large_job_is_split_among_workers_not_among_the_slots_of_one(requests: Requests) -> None:
    workers = [requests.offer(slots=2), requests.offer(slots=2), requests.offer(slots=2)]
    small, busy, outcome = begin(requests, job(), *workers)
    (large,) = requests.run(large_job())
    idle = [worker for worker in workers if worker is not busy]
    for worker in idle:
        worker.compute()
    large.result(TIMEOUT_S)
    assert sorted(channel for worker in idle for (part,) in [worker.parts] for channel in part) == list(range(64))
    assert busy.is_untouched
    outcome.set_result([None])
    small.result(TIMEOUT_S)


def idle_workers(batcher: Batcher, count: int) -> list[GatedWorker]:
    workers = [GatedWorker() for _ in range(count)]
    for each in workers:
        batcher.offer(each)
    return workers


def test_large_jobs_that_share_a_batch_are_not_split() -> None:
    jobs = [large_job(), large_job()]
    batcher = Batcher(max_jobs=3, max_bytes=8 * jobs[0].nbytes)
    workers = idle_workers(batcher, 2)
    for each in jobs:
        each.on_end = lambda: None
        batcher.submit(each)
    (batch,), _ = batcher.begin_batches()
    assert batch.jobs == jobs
    assert [worker.parts for worker in workers if not worker.is_untouched] == [[range(64)] * 2]


@pytest.mark.parametrize(
    ("spec", "nbytes", "split", "workers"),
    [
        pytest.param(LARGE, 2**21, True, 3, id="large"),
        pytest.param(LARGE, 2**21 - 1, True, 1, id="small"),
        pytest.param(LARGE, 2**21, False, 1, id="large, where none is split"),
        pytest.param(SPEC, 2**21, True, 1, id="of few channels"),
    ],
)
def test_a_job_is_split_from_two_mebibytes_on_and_leaves_the_workers_that_it_has_no_part_for(
    spec: Spec, nbytes: int, split: bool, workers: int
) -> None:
    batcher = Batcher(max_jobs=3, max_bytes=2**20, split=split)
    idle_workers(batcher, 3)
    batcher.enter(only := job(spec=spec, nbytes=nbytes))
    batch = batcher.next_batch(only)
    assert batch is not None
    assert len(batch.workers) == workers
    assert len(set(batcher._free) - set(batch.workers)) == 3 - workers


def test_all_batches_of_a_dead_worker_run_again_one_at_a_time(requests: Requests) -> None:
    worker = requests.offer(slots=2)
    lost = [job(0), job(1)]
    begun = [begin(requests, each, worker) for each in lost]
    successor = requests.offer(slots=2)
    begun.append(begin(requests, fresh := job(2), successor))
    fresh_outcome = begun[-1][2]
    for _, _, outcome in begun[:2]:
        worker.die_with(outcome)
    wait_until(lambda: requests.batcher.waiting()[0] == 2)
    assert successor.is_untouched, "a batch runs beside one that was not done when the other worker died"
    fresh_outcome.set_result([None])
    for each in lost:
        batch, outcome = successor.next_batch()
        assert batch == [each]
        assert successor.is_untouched, "two batches run at a time that may have cost a worker"
        outcome.set_result([None])
    wait_for(future for future, _, _ in begun)
    assert [each.attempts for each in (*lost, fresh)] == [2, 2, 1]
    assert worker not in list(requests.batcher._free)


def test_a_fresh_job_runs_beside_none_that_may_have_cost_a_worker_but_beside_others_again(requests: Requests) -> None:
    worker = requests.offer(slots=2)
    rerun, _, outcome = begin(requests, job(0), worker)
    worker.die_with(outcome)
    successor = requests.offer(slots=2)
    _, outcome = successor.next_batch()
    (first,) = requests.run(fresh := job(1))
    assert successor.is_untouched
    outcome.set_result([None])
    rerun.result(TIMEOUT_S)
    batch, first_outcome = successor.next_batch()
    assert batch == [fresh]
    wait_until(lambda: list(requests.batcher._free) == [successor])
    second, _, second_outcome = begin(requests, job(2), successor)
    for future, outcome in ((first, first_outcome), (second, second_outcome)):
        outcome.set_result([None])
        future.result(TIMEOUT_S)


@pytest.mark.parametrize("noticed_first", [0, 1])
def test_the_job_that_kills_is_given_up_and_no_other_that_shared_its_workers(
    requests: Requests, noticed_first: int
) -> None:
    worker = requests.offer(slots=2)
    poison, innocent = job(0), job(1)
    poisonous, _, deadly_outcome = begin(requests, poison, worker)
    fine, _, other_outcome = begin(requests, innocent, worker)
    outcomes = [deadly_outcome, other_outcome]
    worker.die_with(outcomes[noticed_first])
    successor = requests.offer(slots=2)
    worker.die_with(outcomes[1 - noticed_first])
    for _ in range(2):
        batch, outcome = successor.next_batch()
        assert successor.is_untouched
        if batch == [innocent]:
            outcome.set_result([None])
        else:
            successor.die_with(outcome)
            successor = requests.offer(slots=2)
    fine.result(TIMEOUT_S)
    with pytest.raises(ComputeError, match="2 workers died"):
        poisonous.result(TIMEOUT_S)
    assert requests.batcher.counts.quarantined == 1


def test_the_free_slot_of_a_worker_that_died_at_another_is_not_taken(requests: Requests) -> None:
    idle = requests.offer()
    worker = requests.offer(slots=2)
    future, _, outcome = begin(requests, only := job(), worker)
    worker.die_with(outcome)
    assert idle.compute() == [only]
    future.result(TIMEOUT_S)
    assert worker.is_untouched
    assert worker not in list(requests.batcher._free)


def test_a_job_that_cost_a_worker_and_is_given_up_holds_no_slot_back(requests: Requests) -> None:
    worker = requests.offer(slots=2)
    gone: list[bool] = []
    given_up, _, outcome = begin(requests, job(0, is_abandoned=lambda: bool(gone)), worker)
    successor = requests.offer(slots=2)
    held, _, held_outcome = begin(requests, job(1), successor)
    worker.die_with(outcome)
    wait_until(lambda: requests.batcher.waiting()[0] == 1)
    (next_,) = requests.run(job(2))
    assert successor.is_untouched
    gone.append(True)
    assert given_up.exception(TIMEOUT_S) is not None
    assert len(successor.compute()) == 1
    next_.result(TIMEOUT_S)
    held_outcome.set_result([None])
    held.result(TIMEOUT_S)


@pytest.mark.parametrize("amid_a_batch", [False, True])
def test_a_worker_that_has_died_is_forgotten(brief_requests: Requests, amid_a_batch: bool) -> None:
    worker = brief_requests.offer()
    first, same, outcome = begin(brief_requests, job(), worker)
    if amid_a_batch:
        worker.die_with(outcome)
        brief_requests.offer().compute()
    else:
        outcome.set_result([None])
    first.result(TIMEOUT_S)
    wait_until(lambda: len(brief_requests.batcher._free) == 1)
    brief_requests.batcher.withdraw(worker)
    gone = weakref.ref(worker)
    del worker, same, outcome
    gc.collect()
    assert gone() is None
