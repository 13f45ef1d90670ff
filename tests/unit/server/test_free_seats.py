"""Workers that compute several batches at once, and what happens to all of them when such a worker dies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.unit.server.workers import TASK, TIMEOUT_S, GatedWorker, Requests, job, wait_until

from bngrad_kernels.spec import FLOAT32, Spec
from bngrad_server.batching import Batcher, ComputeError
from bngrad_server.jobs import Job

LARGE = Spec(FLOAT32, (8, 64, 64, 64), channel_axis=3)


@pytest.fixture
def requests() -> Iterator[Requests]:
    requests = Requests(Batcher(max_jobs=3, max_bytes=4000))
    yield requests
    requests.end()


def offer(requests: Requests, seats: int = 2) -> GatedWorker:
    """A worker all of whose seats are free."""
    worker = GatedWorker(seats)
    for _ in range(seats):
        requests.batcher.offer(worker)
    return worker


def large_job() -> Job:
    nbytes, key = 3 * LARGE.tensor_nbytes, (FLOAT32, True, True, 1)
    return Job(LARGE, TASK, nbytes, key, client="a", priority=0, deadline=None, is_abandoned=lambda: False)


def test_a_worker_begins_as_many_batches_as_it_has_seats_and_ends_them_in_any_order(requests: Requests) -> None:
    worker = offer(requests)
    jobs = [job(), job(), job()]
    futures = requests.run(*jobs)
    (first, first_outcome), (second, second_outcome) = worker.next_batch(), worker.next_batch()
    assert (first, second) == ([jobs[0]], [jobs[1]])
    assert worker.is_untouched
    second_outcome.set_result([None])
    futures[1].result(TIMEOUT_S)
    assert worker.compute() == [jobs[2]]
    futures[2].result(TIMEOUT_S)
    first_outcome.set_result([None])
    futures[0].result(TIMEOUT_S)
    wait_until(lambda: list(requests.batcher._free) == [worker] * 2)


def test_a_worker_that_is_idle_is_preferred_to_one_that_has_a_free_seat(requests: Requests) -> None:
    workers = [offer(requests), offer(requests)]
    futures = requests.run(job(), job())
    for worker in workers:
        worker.compute()
    for future in futures:
        future.result(TIMEOUT_S)


def test_a_large_job_is_split_among_workers_not_among_the_seats_of_one(requests: Requests) -> None:
    workers = [offer(requests), offer(requests), offer(requests)]
    (small,) = requests.run(job())
    busy = next(worker for worker in workers if not worker.is_untouched)
    batch, outcome = busy.next_batch()
    (large,) = requests.run(large_job())
    idle = [worker for worker in workers if worker is not busy]
    for worker in idle:
        worker.compute()
    large.result(TIMEOUT_S)
    assert sorted(channel for worker in idle for (part,) in [worker.parts] for channel in part) == list(range(64))
    assert busy.is_untouched
    outcome.set_result([None] * len(batch))
    small.result(TIMEOUT_S)


def test_all_batches_of_a_dead_worker_run_again_one_at_a_time(requests: Requests) -> None:
    worker = offer(requests)
    lost = [job(0), job(1)]
    futures = requests.run(*lost)
    outcomes = [worker.next_batch()[1] for _ in lost]
    successor = offer(requests)
    futures += requests.run(fresh := job(2))
    fresh_outcome = successor.next_batch()[1]
    for _ in lost:
        worker.die_with(outcomes.pop(0))
    wait_until(lambda: len(requests.batcher._queue) == 2)
    assert successor.is_untouched, "a batch runs beside one that was not done when the other worker died"
    fresh_outcome.set_result([None])
    for each in lost:
        batch, outcome = successor.next_batch()
        assert batch == [each]
        assert successor.is_untouched, "two batches run at a time that may have cost a worker"
        outcome.set_result([None])
    for future in futures:
        future.result(TIMEOUT_S)
    assert [each.attempts for each in (*lost, fresh)] == [2, 2, 1]
    assert worker not in list(requests.batcher._free)


def test_a_fresh_job_runs_beside_none_that_may_have_cost_a_worker_but_beside_others_again(requests: Requests) -> None:
    worker = offer(requests)
    (rerun,) = requests.run(job(0))
    worker.die()
    successor = offer(requests)
    batch, outcome = successor.next_batch()
    futures = requests.run(first := job(1), second := job(2))
    assert successor.is_untouched
    outcome.set_result([None] * len(batch))
    rerun.result(TIMEOUT_S)
    begun = [successor.next_batch() for _ in futures]
    assert [batch for batch, _ in begun] == [[first], [second]]
    for _, outcome in begun:
        outcome.set_result([None])
    for future in futures:
        future.result(TIMEOUT_S)


@pytest.mark.parametrize("noticed_first", [0, 1])
def test_the_job_that_kills_is_given_up_and_no_other_that_shared_its_workers(
    requests: Requests, noticed_first: int
) -> None:
    worker = offer(requests)
    poison, innocent = job(0), job(1)
    poisonous, fine = requests.run(poison, innocent)
    outcomes = [worker.next_batch()[1] for _ in range(2)]
    worker.die_with(outcomes[noticed_first])
    successor = offer(requests)
    worker.die_with(outcomes[1 - noticed_first])
    for _ in range(2):
        batch, outcome = successor.next_batch()
        assert successor.is_untouched
        if batch == [innocent]:
            outcome.set_result([None])
        else:
            successor.die_with(outcome)
            successor = offer(requests)
    fine.result(TIMEOUT_S)
    with pytest.raises(ComputeError, match="2 workers died"):
        poisonous.result(TIMEOUT_S)
    assert requests.batcher.quarantined == 1


def test_the_free_seat_of_a_worker_that_died_at_another_is_not_taken(requests: Requests) -> None:
    idle = offer(requests, seats=1)
    worker = offer(requests)
    (future,) = requests.run(only := job())
    assert worker.die() == [only]
    assert idle.compute() == [only]
    future.result(TIMEOUT_S)
    assert worker.is_untouched
    assert worker not in list(requests.batcher._free)


def test_a_job_that_cost_a_worker_and_is_given_up_holds_no_seat_back(requests: Requests) -> None:
    worker = offer(requests)
    gone: list[bool] = []
    (given_up,) = requests.run(job(0, is_abandoned=lambda: bool(gone)))
    begun = worker.next_batch()[1]
    successor = offer(requests)
    (held,) = requests.run(job(1))
    (_, held_outcome) = successor.next_batch()
    worker.die_with(begun)
    wait_until(lambda: len(requests.batcher._queue) == 1)
    (next_,) = requests.run(job(2))
    assert successor.is_untouched
    gone.append(True)
    assert given_up.exception(TIMEOUT_S) is not None
    assert len(successor.compute()) == 1
    next_.result(TIMEOUT_S)
    held_outcome.set_result([None])
    held.result(TIMEOUT_S)
