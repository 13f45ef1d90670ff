"""The batcher, with threads as requests and objects as workers."""

from __future__ import annotations

import errno
import functools
import itertools
import os
import random
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from unittest import mock

import pytest
from tests.garbage import no_exceptions_left
from tests.unit.server.scheduling.workers import (
    TIMEOUT_S,
    GatedRun,
    GatedWorker,
    Requests,
    job,
    large_job,
    run_and_check,
    wait_for,
    wait_until,
)

from bngrad_server.errors import ComputeError, WorkerDiedError
from bngrad_server.runtime.event_loop import EventLoop
from bngrad_server.scheduling import dispatch
from bngrad_server.scheduling.batcher import MAX_ATTEMPTS, Batcher
from bngrad_server.scheduling.dispatch import Dispatcher
from bngrad_server.scheduling.job import Job, JobState, Part, Worker


@pytest.fixture
def requests() -> Iterator[Requests]:
    requests = Requests(Batcher(max_jobs=3, max_bytes=4000))
    yield requests
    requests.end()


@pytest.fixture
def worker() -> GatedWorker:
    return GatedWorker()


class UnableWorker(GatedWorker):
    """A worker that raises when it is to begin."""

    def __init__(self, error: type[Exception] = MemoryError) -> None:
        super().__init__()
        self._error = error

    def begin(self, parts: Sequence[Part]) -> GatedRun:
        raise self._error("it cannot begin")


@contextmanager
def takes_at_most(seconds: float) -> Iterator[None]:
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < seconds


@pytest.mark.parametrize(
    ("jobs", "batches"),
    [
        pytest.param([job(0), job(1), job(0), job(2), job(3)], [[0, 2], [1], [3], [4]], id="one kernel a batch"),
        pytest.param([job() for _ in range(5)], [[0, 1, 2], [3, 4]], id="limited in jobs"),
        pytest.param([job(1), job(0), job(1), job(0), job(1), job(1)], [[0, 2, 4], [1, 3], [5]], id="first come first"),
    ],
)
def test_a_batch_is_what_waits_of_the_first_jobs_kernel(
    requests: Requests, worker: GatedWorker, jobs: list[Job], batches: list[list[int]]
) -> None:
    futures = requests.run(*jobs)
    requests.batcher.offer(worker)
    for batch in batches:
        assert worker.compute() == [jobs[i] for i in batch]
    wait_for(futures)


def test_an_idle_worker_begins_at_once(requests: Requests, worker: GatedWorker) -> None:
    requests.batcher.offer(worker)
    for _ in range(2):
        only = job()
        (future,) = requests.run(only)
        assert worker.compute() == [only]
        future.result(TIMEOUT_S)


def test_a_failure_goes_to_its_own_job_alone(requests: Requests, worker: GatedWorker) -> None:
    failing, fine = requests.run(job(), job())
    requests.batcher.offer(worker)
    _, outcome = worker.next_batch()
    outcome.set_result(["MemoryError", None])
    with pytest.raises(ComputeError, match="MemoryError"):
        failing.result(TIMEOUT_S)
    fine.result(TIMEOUT_S)


def test_jobs_of_a_dead_worker_come_first_and_run_alone(requests: Requests, worker: GatedWorker) -> None:
    lost, fresh = [job(), job()], job()
    futures = requests.run(*lost)
    requests.batcher.offer(worker)
    _, outcome = worker.next_batch()
    futures += requests.run(fresh)
    outcome.set_exception(WorkerDiedError("killed"))
    wait_until(lambda: requests.batcher.waiting()[0] == 3)
    successor = requests.offer()
    assert [successor.compute() for _ in range(3)] == [[lost[0]], [lost[1]], [fresh]]
    wait_for(futures)
    assert [each.attempts for each in (*lost, fresh)] == [2, 2, 1]


def test_a_job_is_given_up_when_too_many_workers_died_of_it(requests: Requests) -> None:
    only = job()
    (future,) = requests.run(only)
    for _ in range(MAX_ATTEMPTS):
        worker = requests.offer()
        assert worker.die() == [only]
    with pytest.raises(ComputeError, match=f"{MAX_ATTEMPTS} workers died"):
        future.result(TIMEOUT_S)
    assert only.error is None  # its traceback would keep the frames of its callers


def test_a_job_is_not_blamed_for_deaths_of_workers_that_never_read_it(requests: Requests) -> None:
    only = job()
    (future,) = requests.run(only)
    for _ in range(2 * MAX_ATTEMPTS):
        worker = requests.offer()
        _, outcome = worker.next_batch()
        outcome.set_exception(WorkerDiedError("was dead", saw_batch=False))
        wait_until(lambda: requests.batcher.waiting()[0] == 1)
    beside = requests.offer(slots=2)
    _, outcome = beside.next_batch()
    (second,) = requests.run(job(nbytes=1000))  # does not wait for a brief batch
    beside.compute()  # beside the first one, which is no suspect
    outcome.set_result([None])
    wait_for((future, second))
    assert (only.attempts, requests.batcher.counts.reruns) == (1, 2 * MAX_ATTEMPTS)


@pytest.mark.parametrize("saw_batch", [(True, False), (False, True)])
def test_a_split_job_is_blamed_if_one_of_the_dead_read_it(requests: Requests, saw_batch: tuple[bool, bool]) -> None:
    only = large_job()
    workers = [requests.offer(), requests.offer()]
    (future,) = requests.run(only)
    outcomes = [worker.next_batch()[1] for worker in workers]
    for outcome, saw in zip(outcomes, saw_batch, strict=True):
        outcome.set_exception(WorkerDiedError("killed", saw_batch=saw))
    successor = requests.offer()
    assert successor.compute() == [only]
    future.result(TIMEOUT_S)
    assert only.attempts == MAX_ATTEMPTS


def test_an_idle_worker_takes_over_from_a_dead_one(requests: Requests, worker: GatedWorker) -> None:
    idle, only = GatedWorker(), job()
    requests.batcher.offer(idle)
    requests.batcher.offer(worker)
    (future,) = requests.run(only)
    assert worker.die() == [only]
    assert idle.compute() == [only]
    future.result(TIMEOUT_S)


def test_a_thread_that_holds_a_slot_is_not_handed_another(requests: Requests) -> None:
    holding, held, asked = threading.Event(), threading.Event(), itertools.count()

    def holds_its_own_thread() -> bool:
        """Blocks once the job waits; it is called before as well."""
        if threading.get_ident() == owner.result(TIMEOUT_S) and next(asked) and not holding.is_set():
            held.set()
            holding.wait(TIMEOUT_S)
        return False

    owner: Future[int] = Future()
    slow, own, late = job(0, is_abandoned=holds_its_own_thread), job(1), job(1)

    def run_slow() -> None:
        owner.set_result(threading.get_ident())
        run_and_check(requests.batcher, slow)

    thread = threading.Thread(target=run_slow)
    thread.start()
    assert held.wait(TIMEOUT_S)
    workers = [GatedWorker() for _ in range(3)]
    requests.batcher.offer(workers[0])  # is handed to the thread that is held
    requests.batcher.offer(workers[1])
    futures = requests.run(own)
    batch, outcome = workers[1].next_batch()
    assert batch == [slow]
    requests.batcher.offer(workers[2])
    futures += requests.run(late)
    assert workers[2].compute() == [own, late]
    outcome.set_result([None])
    holding.set()
    thread.join(TIMEOUT_S)
    wait_for(futures)
    assert set(requests.batcher._free) == set(workers)


def test_an_abandoned_job_is_never_run(requests: Requests, worker: GatedWorker) -> None:
    gone = threading.Event()
    abandoned = [job(is_abandoned=gone.is_set), job(is_abandoned=gone.is_set)]
    futures, rest = requests.run(*abandoned), job()
    (fine,) = requests.run(rest)
    gone.set()
    requests.batcher.offer(worker)
    assert worker.compute() == [rest]
    fine.result(TIMEOUT_S)
    for future in futures:
        with pytest.raises(CancelledError):
            future.result(TIMEOUT_S)


def test_a_job_that_waits_ends_at_its_deadline(
    requests: Requests, worker: GatedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_CHECK_INTERVAL_S", 2 * TIMEOUT_S)
    only = job(deadline=time.monotonic() + 0.05)
    with takes_at_most(TIMEOUT_S / 2):
        (future,) = requests.run(only)
        with pytest.raises(TimeoutError):
            future.result(TIMEOUT_S)
    ended = threading.Event()
    requests.batcher.when_untouched(only, ended.set)
    assert ended.is_set()
    requests.batcher.offer(worker)
    (future,) = requests.run(job())
    assert only not in worker.compute()
    future.result(TIMEOUT_S)


@pytest.mark.parametrize("dies", [False, True], ids=["the worker computes", "the worker dies"])
@pytest.mark.parametrize("asked_late", [False, True], ids=["asked at once", "asked afterwards"])
@pytest.mark.parametrize("by", ["deadline", "client"])
def test_a_running_job_is_left_at_once_and_untouched_when_its_worker_is_done(
    requests: Requests, worker: GatedWorker, by: str, asked_late: bool, dies: bool
) -> None:
    gone, untouched = threading.Event(), threading.Event()
    leader = job()
    (leading,) = requests.run(leader)
    rider = job(is_abandoned=gone.is_set)
    (riding,) = requests.run(rider)
    requests.batcher.offer(worker)
    batch, outcome = worker.next_batch()
    assert batch == [leader, rider]
    if by == "client":
        gone.set()
    else:
        rider.deadline = time.monotonic()
    with pytest.raises(TimeoutError if by == "deadline" else CancelledError):
        riding.result(TIMEOUT_S)
    if not asked_late:
        requests.batcher.when_untouched(rider, untouched.set)
        assert not untouched.is_set()
    if dies:
        outcome.set_exception(WorkerDiedError("killed"))
        wait_until(lambda: leader.state is JobState.WAITING)
    else:
        outcome.set_result([None, None])
        leading.result(TIMEOUT_S)
    if asked_late:
        requests.batcher.when_untouched(rider, untouched.set)
    assert untouched.wait(TIMEOUT_S)
    assert rider.has_ended
    successor = requests.offer()
    if dies:
        assert successor.compute() == [leader]
        leading.result(TIMEOUT_S)
    assert successor.is_untouched


def test_a_running_job_that_is_given_up_leaves_no_garbage(requests: Requests, worker: GatedWorker) -> None:
    only = job()
    (running,) = requests.run(only)
    requests.batcher.offer(worker)
    _, outcome = worker.next_batch()
    only.deadline = time.monotonic()
    with no_exceptions_left(), suppress(TimeoutError):
        requests.batcher.expire(only)
        pytest.fail("the job was not given up")
    outcome.set_result([None])
    running.result(TIMEOUT_S)


def test_an_unexpected_error_of_a_worker_ends_its_leader_alone(requests: Requests, worker: GatedWorker) -> None:
    leader, rider = job(), job()
    leading, riding = requests.run(leader, rider)
    requests.batcher.offer(worker)
    _, outcome = worker.next_batch()
    outcome.set_exception(MemoryError())
    with pytest.raises(MemoryError):
        leading.result(TIMEOUT_S)
    assert leader.has_ended
    successor = requests.offer()
    assert successor.compute() == [rider]
    riding.result(TIMEOUT_S)


def test_a_batch_that_cannot_be_begun_ends_its_leader_alone(requests: Requests) -> None:
    leader, rider = job(), job()
    leading, riding = requests.run(leader, rider)
    broken = UnableWorker()
    requests.batcher.offer(broken)
    with pytest.raises(MemoryError):
        leading.result(TIMEOUT_S)
    assert leader.has_ended
    assert broken.killed
    successor = requests.offer()
    assert successor.compute() == [rider]
    riding.result(TIMEOUT_S)


@pytest.mark.parametrize("error", [MemoryError, WorkerDiedError])
def test_batches_of_the_event_loop_that_cannot_be_begun_are_answered_and_others_go_on(error: type[Exception]) -> None:
    batcher, event_loop = Batcher(max_jobs=3, max_bytes=4000), EventLoop("event-loop")
    Dispatcher(event_loop, batcher)
    event_loop.start()

    def submit() -> tuple[Job, threading.Event]:
        only, has_ended = job(), threading.Event()
        only.on_end = has_ended.set
        batcher.submit(only)
        return only, has_ended

    submitted = [submit() for _ in range(3)]
    for _ in range(2 * MAX_ATTEMPTS):
        batcher.offer(UnableWorker(error))
    for only, has_ended in submitted:
        assert has_ended.wait(TIMEOUT_S)
        with pytest.raises(ComputeError, match="2 workers died while computing this request"):
            only.check()
    assert batcher.waiting() == (0, 0)
    batcher.offer(RandomWorker(World(random.Random(0), lambda _: False), slots=1))
    only, has_ended = submit()
    event_loop.call_soon(lambda: None)
    assert has_ended.wait(TIMEOUT_S)
    only.check()
    event_loop.stop(TIMEOUT_S)
    assert not event_loop.is_alive


def test_a_worker_that_was_withdrawn_gets_no_job(requests: Requests, worker: GatedWorker) -> None:
    requests.batcher.offer(worker)
    requests.batcher.withdraw(worker)
    requests.batcher.withdraw(worker)
    only, successor = job(), GatedWorker()
    (future,) = requests.run(only)
    assert worker.is_untouched
    requests.batcher.offer(successor)
    assert successor.compute() == [only]
    future.result(TIMEOUT_S)


def test_a_job_of_the_event_loop_does_not_wait_for_one_before_it_that_was_abandoned(worker: GatedWorker) -> None:
    batcher = Batcher(max_jobs=3, max_bytes=4000)
    gone, only = job(0, is_abandoned=lambda: True), job(1)
    for each in (gone, only):
        each.on_end = lambda: None
        batcher.submit(each)
    batcher.offer(worker)
    (batch,), _ = batcher.begin_batches()
    assert batch.jobs == [only]
    assert gone.has_ended


@pytest.mark.parametrize("dies", [False, True], ids=["the worker computes", "the worker dies"])
def test_closing_ends_every_job_that_no_worker_has(requests: Requests, worker: GatedWorker, dies: bool) -> None:
    (held,) = requests.run(job(0))
    requests.batcher.offer(worker)
    _, outcome = worker.next_batch()
    waiting = requests.run(*(job(1) for _ in range(3)))
    requests.batcher.close()
    assert requests.batcher.waiting() == (0, 0)
    for each in waiting:
        with pytest.raises(CancelledError):
            each.result(TIMEOUT_S)
    with pytest.raises(CancelledError):
        run_and_check(requests.batcher, job())
    if dies:
        outcome.set_exception(WorkerDiedError("killed"))
        with pytest.raises(CancelledError):
            held.result(TIMEOUT_S)
    else:
        outcome.set_result([None])
        held.result(TIMEOUT_S)
    requests.batcher.offer(worker)
    assert worker.is_untouched


@dataclass
class World:
    """What random workers share: memory touched now, broken rules, and `kills`: whether a worker dies of a batch."""

    random: random.Random
    kills: Callable[[list[Job]], bool]
    touched: set[int] = field(default_factory=set)
    violations: list[str] = field(default_factory=list)
    mutex: threading.Lock = field(default_factory=threading.Lock)


class RandomWorker:
    """Takes a random time over its batches, and sometimes dies."""

    def __init__(self, world: World, slots: int) -> None:
        self.slots = slots
        self.world = world
        self.has_died = threading.Event()
        self.batches: list[list[Job]] = []

    def begin(self, parts: Sequence[Part]) -> RandomRun:
        batch = [job for job, _ in parts]
        world = self.world
        with world.mutex:
            self.batches.append(batch)
            if len({each.kernel_key for each in batch}) != 1:
                world.violations.append("jobs of two kernels are in a batch")
            if len(self.batches) > self.slots:
                world.violations.append("a worker has more batches than slots")
            jobs = list(itertools.chain(*self.batches))
            if len(jobs) > 1 and any(each.attempts > 1 for each in jobs):
                world.violations.append("a job that has cost a worker runs beside others")
        return RandomRun(self, batch)

    def has_copy(self, number: int) -> bool:
        return False

    def kill(self) -> None:
        pass


class RandomRun:
    def __init__(self, worker: RandomWorker, batch: list[Job]) -> None:
        self._worker = worker
        self._batch = batch
        self._done = os.eventfd(1)
        weakref.finalize(self, os.close, self._done)

    def fileno(self) -> int:
        return self._done

    def finish(self) -> list[str | None]:
        worker, world = self._worker, self._worker.world
        os.eventfd_read(self._done)
        ids = {id(each) for each in self._batch}
        with world.mutex:
            if ids & world.touched:
                world.violations.append("two workers touch the memory of a job")
            world.touched |= ids
            duration_s = world.random.choice((0, 0, 0.0005, 0.002))
        time.sleep(duration_s)
        with world.mutex:
            world.touched -= ids
            worker.batches.remove(self._batch)
            if worker.has_died.is_set():
                raise WorkerDiedError("was dead")
            if world.random.random() < 0.03:
                worker.has_died.set()
                raise WorkerDiedError("never read it", saw_batch=False)
            if world.kills(self._batch):
                worker.has_died.set()
                raise WorkerDiedError("killed")
        return ["Error" if each.nbytes % 7 == 0 else None for each in self._batch]


KINDS_OF_END = {type(None), TimeoutError, CancelledError, ComputeError}


def is_poison(nbytes: int) -> bool:
    return nbytes % 17 == 3


@pytest.mark.slow
@pytest.mark.parametrize("poisoned", [False, True], ids=["deaths by chance", "deaths by poison"])
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("n_workers", range(1, 4))
def test_every_job_ends_once_and_no_worker_is_lost(  # noqa: PLR0915 - one scenario
    n_workers: int, slots: int, poisoned: bool
) -> None:
    random_ = random.Random(n_workers)
    world = World(
        random_, lambda batch: any(is_poison(each.nbytes) for each in batch) if poisoned else random_.random() < 0.1
    )
    batcher = Batcher(max_jobs=4, max_bytes=1000)
    event_loop = EventLoop("event-loop")
    Dispatcher(event_loop, batcher)
    event_loop.start()
    untouched = set[int]()
    ended: dict[int, tuple[Job, Exception | None]] = {}
    numbers, stopping = itertools.count(), threading.Event()
    began = time.monotonic()

    def supervise() -> None:
        while not stopping.is_set():
            worker = RandomWorker(world, slots)
            for _ in range(slots):
                batcher.offer(worker)
            while not worker.has_died.wait(0.01) and not stopping.is_set():
                pass
            batcher.withdraw(worker)

    def outcomes() -> Counter[type]:
        with world.mutex:
            return Counter(type(error) for _, error in ended.values())

    def is_enough() -> bool:
        """Whether every kind of end was seen, which takes longer where the machine is slow."""
        seen = outcomes()
        return time.monotonic() > began + 0.8 and seen[type(None)] > 100 and set(seen) == KINDS_OF_END

    def request() -> None:
        while not is_enough() and time.monotonic() < began + TIMEOUT_S:
            with world.mutex:
                number, key, timeout_s = next(numbers), random_.randrange(2), random_.choice((None, 0, 0.001, 0.003))
            begin = time.monotonic()
            nbytes = 1 + number % 300
            if poisoned and is_poison(nbytes):
                timeout_s = None  # so that some are surely given up
            gone_at = begin + 0.001 if number % 5 == 0 and timeout_s is not None else float("inf")
            deadline = None if timeout_s is None else begin + timeout_s
            only = job(key, nbytes, functools.partial(is_past, gone_at), client=str(number % 3), deadline=deadline)
            error: Exception | None = None
            try:
                if number % 2:
                    run_and_check(batcher, only)
                else:
                    submit_and_wait(only)
            except (TimeoutError, CancelledError, ComputeError) as caught:
                error = caught
            with world.mutex:
                ended[number] = (only, error)
            batcher.when_untouched(only, functools.partial(release, number, only))

    def submit_and_wait(only: Job) -> None:
        has_ended = threading.Event()
        only.on_end = has_ended.set
        batcher.submit(only)
        event_loop.call_soon(lambda: None)
        while not has_ended.wait(0.0005):
            batcher.expire(only)
        if only.error is not None:
            raise only.error

    def release(number: int, only: Job) -> None:
        assert id(only) not in world.touched
        assert number not in untouched
        untouched.add(number)

    with ThreadPoolExecutor(24 + n_workers) as threads:
        supervisors = [threads.submit(supervise) for _ in range(n_workers)]
        for future in [threads.submit(request) for _ in range(24)]:
            future.result(2 * TIMEOUT_S)
        wait_until(lambda: sum(is_alive(worker) for worker in list(batcher._free)) == n_workers * slots)
        stopping.set()
        wait_for(supervisors)
    event_loop.stop(TIMEOUT_S)
    assert not event_loop.is_alive
    assert batcher.waiting() == (0, 0)
    assert not world.touched
    assert not world.violations
    assert set(ended) == untouched == set(range(next(numbers)))
    assert all(only.has_ended for only, _ in ended.values())
    assert outcomes()[type(None)] > 100
    assert set(outcomes()) == KINDS_OF_END
    if poisoned:
        given_up = [is_poison(only.nbytes) for only, error in ended.values() if "workers died" in str(error)]
        assert given_up
        assert all(given_up), "a job was blamed for another"


def is_past(moment: float) -> bool:
    return time.monotonic() > moment


def is_alive(worker: Worker) -> bool:
    assert isinstance(worker, RandomWorker)
    return not worker.has_died.is_set()


@pytest.fixture
def idle_workers(requests: Requests) -> list[GatedWorker]:
    return [requests.offer() for _ in range(3)]


def test_a_large_job_is_split_by_channels_among_the_workers_that_are_idle(
    requests: Requests, idle_workers: list[GatedWorker]
) -> None:
    large, small = large_job(), job()
    (future,) = requests.run(large)
    batches = [worker.next_batch() for worker in idle_workers]
    assert [batch for batch, _ in batches] == [[large]] * 3
    assert sorted(c for worker in idle_workers for channels in worker.parts for c in channels) == list(range(64))
    (waiting,) = requests.run(small)
    for _, outcome in batches:
        assert not future.done()
        outcome.set_result([None])
    future.result(TIMEOUT_S)
    wait_until(lambda: any(not worker.is_untouched for worker in idle_workers))
    next(worker for worker in idle_workers if not worker.is_untouched).compute()
    waiting.result(TIMEOUT_S)
    wait_until(lambda: len(requests.batcher._free) == 3)


def test_a_part_that_fails_fails_its_job(requests: Requests, idle_workers: list[GatedWorker]) -> None:
    (future,) = requests.run(large_job())
    for worker, failure in zip(idle_workers, [None, "MemoryError", None], strict=True):
        _, outcome = worker.next_batch()
        outcome.set_result([failure])
    with pytest.raises(ComputeError, match="MemoryError"):
        future.result(TIMEOUT_S)
    wait_until(lambda: len(requests.batcher._free) == 3)


@pytest.mark.parametrize("dead", range(3))
def test_a_job_of_which_one_worker_died_runs_alone_once_the_others_are_done(
    requests: Requests, idle_workers: list[GatedWorker], dead: int
) -> None:
    large = large_job()
    (future,) = requests.run(large)
    outcomes = [worker.next_batch()[1] for worker in idle_workers]
    outcomes[dead].set_exception(WorkerDiedError("killed"))
    for outcome in outcomes:
        if outcome is not outcomes[dead]:
            assert large.state is JobState.RUNNING
            outcome.set_result([None])
    wait_until(lambda: any(not worker.is_untouched for worker in idle_workers))
    survivor = next(worker for worker in idle_workers if not worker.is_untouched)
    assert survivor is not idle_workers[dead]
    assert survivor.compute() == [large]
    assert survivor.parts == [range(64)]
    future.result(TIMEOUT_S)
    assert idle_workers[dead].killed
    wait_until(lambda: set(requests.batcher._free) == set(idle_workers) - {idle_workers[dead]})


def split_among(workers: Sequence[GatedWorker], batcher: Batcher, event_loop: EventLoop) -> tuple[Job, threading.Event]:
    """Submits a job that all workers get a part of; returns it, and what is set at its end."""
    event_loop.start()
    for each in workers:
        batcher.offer(each)
    only, has_ended = large_job(), threading.Event()
    only.on_end = has_ended.set
    batcher.submit(only)
    event_loop.call_soon(lambda: None)
    return only, has_ended


def test_the_event_loop_ends_a_split_job_once_no_worker_has_it_also_after_an_unexpected_error() -> None:
    batcher, event_loop = Batcher(max_jobs=3, max_bytes=4000), EventLoop("event-loop")
    Dispatcher(event_loop, batcher)
    workers = [GatedWorker(), GatedWorker()]
    only, has_ended = split_among(workers, batcher, event_loop)
    first, second = (worker.next_batch()[1] for worker in workers)
    first.set_result([None])
    for _ in range(2):  # in the second round, the loop has seen that at the latest
        passed = threading.Event()
        event_loop.call_soon(passed.set)
        assert passed.wait(TIMEOUT_S)
    assert only.state is JobState.RUNNING
    second.set_exception(MemoryError())
    wait_until(lambda: batcher.waiting()[0] == 1)
    assert all(each.killed for each in workers)
    successor = GatedWorker()
    batcher.offer(successor)
    assert successor.compute() == [only]
    assert has_ended.wait(TIMEOUT_S)
    only.check()
    event_loop.stop(TIMEOUT_S)
    assert not event_loop.is_alive


def test_the_event_loop_waits_for_workers_that_the_system_cannot_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    batcher, event_loop = Batcher(max_jobs=3, max_bytes=4000), EventLoop("event-loop")
    Dispatcher(event_loop, batcher)
    no_room = OSError(errno.ENOSPC, "too many descriptors are watched")
    monkeypatch.setattr(event_loop, "add_priority_reader", mock.Mock(side_effect=no_room))
    workers = [GatedWorker(), GatedWorker()]
    only, has_ended = split_among(workers, batcher, event_loop)
    for each in workers:
        each.next_batch()[1].set_result([None])
    assert has_ended.wait(TIMEOUT_S)
    only.check()
    event_loop.stop(TIMEOUT_S)
    assert not event_loop.is_alive


def test_a_job_waits_for_others_no_longer_than_the_batch_delay(worker: GatedWorker) -> None:
    requests = Requests(Batcher(max_jobs=3, max_bytes=4000, max_delay_s=1.5))
    first = [job(), job()]
    futures = requests.run(*first)
    requests.batcher.offer(worker)
    assert worker.compute() == first
    assert time.monotonic() - first[0].arrival >= 1.5
    requests.end()
    wait_for(futures)


def test_the_event_loop_rests_while_jobs_wait_for_a_busy_worker_beyond_the_batch_delay(worker: GatedWorker) -> None:
    batcher, event_loop = Batcher(max_jobs=3, max_bytes=4000, max_delay_s=0.001), EventLoop("event-loop")
    Dispatcher(event_loop, batcher)
    event_loop.start()
    batcher.offer(worker)
    jobs, ended = [job(), job()], list[Job]()
    for each in jobs:
        each.on_end = functools.partial(ended.append, each)
    batcher.submit(jobs[0])
    event_loop.call_soon(lambda: None)
    _, outcome = worker.next_batch()
    batcher.submit(jobs[1])
    event_loop.call_soon(lambda: None)
    time.sleep(0.1)
    rounds = event_loop.rounds
    time.sleep(0.5)
    assert event_loop.rounds - rounds < 50  # ten ticks a second, where it once ran 300,000 rounds
    outcome.set_result([None])
    assert worker.compute() == [jobs[1]]
    wait_until(lambda: ended == jobs)
    event_loop.stop(TIMEOUT_S)
    assert not event_loop.is_alive


def test_a_full_batch_does_not_wait_for_the_batch_delay(worker: GatedWorker) -> None:
    requests = Requests(Batcher(max_jobs=3, max_bytes=4000, max_delay_s=TIMEOUT_S))
    requests.batcher.offer(worker)
    jobs = [job(), job(), job()]
    with takes_at_most(TIMEOUT_S / 2):
        futures = requests.run(*jobs)
        assert worker.compute() == jobs
        wait_for(futures)
    assert not requests.batcher._delayed
    requests.end()


def test_the_event_loop_is_told_when_a_job_will_have_waited_for_the_batch_delay(worker: GatedWorker) -> None:
    batcher, only = Batcher(max_jobs=3, max_bytes=4000, max_delay_s=60), job()
    batcher.offer(worker)
    batcher.submit(only)
    batches, look_at = batcher.begin_batches()
    assert not batches
    assert look_at == pytest.approx(only.arrival + 60, abs=TIMEOUT_S)


def test_the_event_loop_is_woken_when_a_slot_becomes_free_for_a_job_that_waits(worker: GatedWorker) -> None:
    batcher, woken = Batcher(max_jobs=3, max_bytes=4000), list[tuple[int, int]]()
    batcher.notify(lambda: woken.append((len(batcher._free), len(batcher._queue))))
    batcher.offer(worker)
    assert woken == []
    batcher.withdraw(worker)
    batcher.submit(only := job())
    only.on_end = lambda: None
    batcher.offer(worker)
    assert woken == [(1, 1)]


def test_a_submitted_job_that_is_left_calls_nobody_back(worker: GatedWorker) -> None:
    batcher, called = Batcher(max_jobs=3, max_bytes=4000), threading.Event()
    only = job()
    only.on_end = called.set
    batcher.submit(only)
    batcher.offer(worker)
    (batch,), _ = batcher.begin_batches()
    assert batcher.leave(only, CancelledError())
    batcher.end_batch(batch)
    assert only.has_ended
    assert not called.is_set()
    batcher.when_untouched(only, called.set)
    assert called.is_set()


def test_who_is_called_back_may_ask_the_batcher(worker: GatedWorker) -> None:
    batcher, told = Batcher(max_jobs=3, max_bytes=4000), list[tuple[int, int]]()
    only = job()
    only.on_end = lambda: batcher.when_untouched(only, lambda: told.append(batcher.waiting()))
    batcher.offer(worker)
    batcher.submit(only)
    (batch,), _ = batcher.begin_batches()
    asking = threading.Thread(target=batcher.end_batch, args=(batch,), daemon=True)  # it may wait for itself
    asking.start()
    asking.join(TIMEOUT_S)
    assert told == [(0, 0)]
    assert only.on_end is None  # or they would be a reference cycle


def test_what_is_computed_is_counted(requests: Requests, worker: GatedWorker) -> None:
    counts, jobs = requests.batcher.counts, [job(nbytes=100), job(nbytes=200), job(nbytes=300)]
    futures = requests.run(*jobs)
    requests.batcher.offer(worker)
    assert worker.compute() == jobs
    wait_for(futures)
    busy_s = jobs[0].ended_at - jobs[0].started_at
    assert (counts.jobs, counts.jobs_nbytes, counts.ended) == (3, 600, 3)
    assert counts.busy_s == pytest.approx(busy_s)
    assert counts.front_busy_s == 0
    assert all(each.arrival < each.started_at < each.ended_at for each in jobs)
    requests.batcher.count_single(0, 0.25)
    assert (counts.jobs, counts.jobs_nbytes, counts.ended) == (4, 600, 4)
    assert counts.busy_s == pytest.approx(busy_s + 0.25)
    assert counts.front_busy_s == 0.25
    for nbytes in (2**40 - 1, 2**60):
        counts.add(2**20, nbytes)
    assert {i: count for i, count in enumerate(counts.sizes) if count} == {0: 1, 1: 1, 15: 2}
    assert {i: count for i, count in enumerate(counts.nbytes) if count} == {0: 1, 9: 1, 39: 1, 40: 1}


def test_all_workers_of_a_split_job_count_as_busy(requests: Requests, idle_workers: list[GatedWorker]) -> None:
    (future,) = requests.run(large := large_job())
    for worker in idle_workers:
        worker.compute()
    future.result(TIMEOUT_S)
    assert requests.batcher.counts.busy_s == pytest.approx(3 * (large.ended_at - large.started_at))
