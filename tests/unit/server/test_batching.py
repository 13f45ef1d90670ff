from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import pytest

from bngrad_kernels.spec import BFLOAT16, FLOAT32, Spec
from bngrad_server.batching import Batcher, Job

FLOAT32_SPEC = Spec(FLOAT32, (2, 3, 3, 4), channel_axis=3)
BFLOAT16_SPEC = Spec(BFLOAT16, (2, 3, 3, 4), channel_axis=3)
CHANNELS_FIRST_SPEC = Spec(FLOAT32, (2, 4, 3, 3), channel_axis=1)
INFERENCE_SPEC = Spec(FLOAT32, (2, 3, 3, 4), channel_axis=3, is_training=False)


def job(spec: Spec = FLOAT32_SPEC, nbytes: int = 100) -> Job:
    return Job(spec, offset=0, nbytes=nbytes, has_scale=True)


@pytest.fixture
def batcher() -> Batcher:
    return Batcher(max_jobs=3, max_bytes=1000)


def test_a_batch_is_whatever_waits_of_the_first_jobs_kernel(batcher: Batcher) -> None:
    jobs = [job(), job(BFLOAT16_SPEC), job(), job(CHANNELS_FIRST_SPEC), job(INFERENCE_SPEC)]
    for each in jobs:
        batcher.put(each)
    assert batcher.take() == [jobs[0], jobs[2]]
    assert batcher.take() == [jobs[1]]
    assert batcher.take() == [jobs[3]]
    assert batcher.take() == [jobs[4]]


def test_a_batch_is_limited_in_jobs(batcher: Batcher) -> None:
    jobs = [job() for _ in range(5)]
    for each in jobs:
        batcher.put(each)
    assert batcher.take() == jobs[:3]
    assert batcher.take() == jobs[3:]


def test_a_batch_is_closed_once_its_bytes_reach_the_limit(batcher: Batcher) -> None:
    jobs = [job(nbytes=5000), job(nbytes=999), job(nbytes=1), job(nbytes=1)]
    for each in jobs:
        batcher.put(each)
    assert batcher.take() == jobs[:1]
    assert batcher.take() == jobs[1:3]
    assert batcher.take() == jobs[3:]


def test_an_abandoned_job_is_never_taken(batcher: Batcher) -> None:
    jobs = [job(BFLOAT16_SPEC), job(), job()]
    for each in jobs:
        batcher.put(each)
    jobs[0].abandon()
    assert batcher.take() == jobs[1:]


def test_abandoning_a_job_that_a_worker_has_got_lets_it_end(batcher: Batcher) -> None:
    batcher.put(job())
    (taken,) = batcher.take()
    taken.abandon()
    taken.done.set_result(None)
    assert not taken.done.cancelled()


def test_jobs_of_a_dead_worker_come_first_and_run_alone(batcher: Batcher) -> None:
    lost = [job(), job()]
    for each in lost:
        batcher.put(each)
    assert batcher.take() == lost
    fresh = job()
    batcher.put(fresh)
    batcher.put_back(lost)
    assert [batcher.take() for _ in range(3)] == [[lost[0]], [lost[1]], [fresh]]
    assert [each.attempts for each in (*lost, fresh)] == [2, 2, 1]


def test_taking_waits_for_a_job(batcher: Batcher) -> None:
    taken: list[list[Job]] = []
    thread = threading.Thread(target=lambda: taken.append(batcher.take()))
    thread.start()
    only = job()
    batcher.put(only)
    thread.join()
    assert taken == [[only]]


def test_an_abandoned_take_ends_empty_when_woken(batcher: Batcher) -> None:
    gone = threading.Event()
    taken: list[list[Job]] = []
    thread = threading.Thread(target=lambda: taken.append(batcher.take(gone.is_set)))
    thread.start()
    gone.set()
    batcher.wake()
    thread.join()
    assert taken == [[]]


def test_closing_ends_every_job_that_no_worker_holds(batcher: Batcher) -> None:
    batcher.put(job())
    (held,) = batcher.take()
    waiting, late = job(), job()
    batcher.put(waiting)
    batcher.close()
    batcher.put(late)
    batcher.put_back([held])
    assert batcher.take() == []
    for each in (waiting, late, held):
        with pytest.raises(CancelledError):
            each.done.result(timeout=0)
