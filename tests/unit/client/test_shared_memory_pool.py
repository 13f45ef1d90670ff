"""Pooled memory: the client's own, and leased from a real lease server."""

from __future__ import annotations

import gc
import itertools
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from io import FileIO
from pathlib import Path
from types import FrameType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.servers import wait_until
from tests.unit.client.calls import interrupt_after, interrupt_at
from tests.unit.client.endpoints import full_listener

from bngrad._credentials import Credentials, Security
from bngrad._deadline import ENDLESS, Cancellation, Deadline
from bngrad._shared_memory import lease as lease_module
from bngrad._shared_memory import pool as pool_module
from bngrad._shared_memory.lease import LeaseEndedError, LeaseError, LeaseLateError, LeaseRefusedError, UnreachableError
from bngrad._shared_memory.pool import Pool
from bngrad._shared_memory.quarantine import AbandonedCall, Output, Quarantine
from bngrad_server.memory.leases import LeaseServer
from bngrad_server.memory.regions import Region, Regions
from bngrad_wire.lease_protocol import ALIGNMENT, KEY_NBYTES, unpack_request

MIB = 2**20
REGION_NBYTES = 64 * MIB
BYTE = np.dtype(np.uint8)
SECONDS = 30.0


class LeasesInThread:
    """Leases regions as a server does, without its workers; sets `ended` once a region was given back."""

    def __init__(self, max_nbytes: int = 1024 * MIB) -> None:
        self.leased: list[int] = []
        self.ended = threading.Event()
        self.regions = Regions(max_nbytes, lambda region: self.leased.append(region.number), self._end)
        self._sockets = LeaseServer(self.regions, None)
        self._is_open = True
        self.path = str(self._sockets.directory / "regions")
        self._sockets.start()

    def _end(self, region: Region) -> None:
        self.ended.set()

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._sockets.close()


@pytest.fixture(params=["own", "leased"])
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    with closing(LeasesInThread()) as server, closing(Pool(server.path if request.param == "leased" else None)) as pool:
        yield pool


def address(array: Any) -> int:
    at: int = array.ctypes.data
    return at


def place_of(pool: Pool, array: Any) -> tuple[bytes, int]:
    located = pool.locate(array)
    assert located is not None
    assert located.array is array
    return located.place


def filled(pool: Pool, nbytes: int, value: int) -> Any:
    array = pool.empty((nbytes,), BYTE)
    array[:] = value
    return array


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.int64, np.uint8])
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1,), (3, 5, 7), (1000, 1001)])
def test_arrays_have_their_shape_and_dtype_and_are_aligned(shape: tuple[int, ...], dtype: Any) -> None:
    with closing(Pool(None)) as pool:
        array = pool.empty(shape, np.dtype(dtype))
        assert (array.shape, array.dtype) == (shape, dtype)
        assert array.flags.writeable
        assert address(array) % ALIGNMENT == 0


@pytest.mark.parametrize("seed", range(3))
def test_live_arrays_of_many_threads_never_overlap(pool: Pool, seed: int) -> None:
    def work(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        alive: list[tuple[Any, int]] = []
        for step in range(150):
            value = (number * 150 + step) % 256
            if len(alive) < 4 or rng.random() < 0.5:
                nbytes = rng.choice([0, 1, 63, 64, 65, 4000, 100_000, 300_000])
                alive.append((filled(pool, nbytes, value), value))
            else:
                array, value = alive.pop(rng.randrange(len(alive)))
                view = array[len(array) // 2 :]
                del array
                alive.append((view, value))
            if len(alive) > 12:
                del alive[rng.randrange(len(alive))]
            for array, expected in rng.sample(alive, min(3, len(alive))):
                assert (array == expected).all()
        assert all((array == expected).all() for array, expected in alive)

    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(work, number) for number in range(8)]:
            done.result(SECONDS)
    assert len(pool._regions) == 1


def test_a_block_is_reused_once_the_array_and_all_its_views_have_gone(pool: Pool) -> None:
    array = pool.empty((1000,), BYTE)
    at = address(array)
    view = np.asarray(array.data[10:20])
    del array
    assert address(other := pool.empty((1000,), BYTE)) != at
    del view
    assert address(pool.empty((1000,), BYTE)) == at
    assert address(other) != at


def test_a_block_whose_array_is_in_a_cycle_is_returned_by_the_garbage_collector(pool: Pool) -> None:
    array = pool.empty((1000,), BYTE)
    at, cycle = address(array), [array]
    cycle.append(cycle)  # type: ignore[arg-type]
    del array, cycle
    gc.collect()
    assert address(pool.empty((1000,), BYTE)) == at


def test_steady_traffic_takes_no_new_memory(pool: Pool) -> None:
    sizes = [3 * MIB, 5 * MIB + 3, 100, 4 * MIB]
    places = set()
    for turn in range(50):
        arrays = [filled(pool, nbytes - turn % 3, turn) for nbytes in sizes]
        if turn == 10:
            places = {address(array) for array in arrays}
        assert turn < 10 or {address(array) for array in arrays} == places
        assert all((array == turn).all() for array in arrays)
        del arrays
    assert len(pool._regions) == 1


def test_a_region_without_arrays_is_reused_for_other_sizes(pool: Pool) -> None:
    for nbytes in [30 * MIB, 20 * MIB, 60 * MIB, 33 * MIB, 64 * MIB, 8 * MIB]:
        arrays = [filled(pool, nbytes, value) for value in range(REGION_NBYTES // nbytes)]
        assert all((array[:: 2**12] == value).all() for value, array in enumerate(arrays))
        assert len(pool._regions) == 1
        del arrays


def test_a_region_with_an_array_left_is_not_reused(pool: Pool) -> None:
    kept = filled(pool, 1000, 1)
    for nbytes in (50 * MIB, 55 * MIB, 60 * MIB):
        filled(pool, nbytes, 2)
    assert (kept == 1).all()
    assert pool.locate(kept) is not None


def test_an_array_larger_than_a_region_replaces_it_with_one_of_its_size(pool: Pool) -> None:
    first = pool.empty((10,), BYTE)
    del first
    array = pool.empty((REGION_NBYTES + 1,), BYTE)
    array[-1] = 7
    (region,) = pool._regions
    assert REGION_NBYTES < region.nbytes <= REGION_NBYTES * 9 // 8
    assert place_of(pool, array) == (region.key, 0)


def test_arrays_are_located_only_where_a_region_holds_all_of_them(pool: Pool) -> None:
    first, second = pool.empty((100,), BYTE), pool.empty((3, 4), np.dtype(np.float32))
    (region,) = pool._regions
    assert place_of(pool, first) == (region.key, 0)
    assert place_of(pool, second) == (region.key, 128)
    assert place_of(pool, first[64:]) == (region.key, 64)
    assert pool.locate(first[1:]) is None  # not aligned
    for array in (np.empty(100, np.uint8), np.frombuffer(bytes(4096), np.uint8)):
        assert pool.locate(array) is None
    beyond = np.lib.stride_tricks.as_strided(first, (region.nbytes + 1,))
    assert pool.locate(beyond) is None
    with closing(Pool(None)) as another:
        assert another.locate(first) is None


@pytest.mark.parametrize("nbytes", [1, MIB, 5 * MIB])
def test_copies_are_made_of_the_arrays_that_lie_elsewhere_alone(pool: Pool, nbytes: int) -> None:
    within, outside = filled(pool, nbytes, 1), [np.full(nbytes, value, np.uint8) for value in (2, 3, 4)]
    copies = pool.copies([outside[0], within, *outside[1:]], ENDLESS, Cancellation())
    assert copies[1].array is within
    assert [place_of(pool, copy.array) for copy in copies] == [copy.place for copy in copies]
    assert [set(np.unique(copy.array).tolist()) for copy in copies] == [{2}, {1}, {3}, {4}]


def test_copies_of_many_threads_at_once_have_the_values_of_their_arrays(pool: Pool) -> None:
    def copied(value: int) -> bool:
        copies = pool.copies([np.full(3 * MIB, value + i, np.uint8) for i in range(3)], ENDLESS, Cancellation())
        return all((copy.array == value + i).all() for i, copy in enumerate(copies))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(copied, range(0, 120, 3)))


def test_only_leased_regions_have_a_key() -> None:
    with closing(LeasesInThread()) as server, closing(Pool(None)) as own, closing(Pool(server.path)) as leased:
        for pool, length in ((own, 0), (leased, 16)):
            key, offset = place_of(pool, array := pool.empty((1,), BYTE))
            assert (len(key), offset, len(array)) == (length, 0, 1)


def test_closing_keeps_arrays_and_makes_no_new_ones(pool: Pool) -> None:
    array, gone = filled(pool, 1000, 5), filled(pool, 3000, 6)
    pool.close()
    pool.close()
    del gone
    assert (array == 5).all()
    array[:] = 6
    assert pool.locate(array) is None
    assert not pool.check()
    for nbytes in (1000, 3000):
        with pytest.raises(LeaseError, match="the client was closed"):
            pool.empty((nbytes,), BYTE)
    assert (array == 6).all()


def test_closing_frees_the_memory_of_arrays_that_have_gone_and_of_those_that_go_later(pool: Pool) -> None:
    gone, kept = filled(pool, 1000, 5), filled(pool, REGION_NBYTES, 6)
    of_gone, of_kept = map(weakref.ref, pool._regions)
    del gone
    pool.close()
    assert of_gone() is None
    assert (kept == 6).all()
    del kept
    assert of_kept() is None


def test_memory_that_no_server_uses_leaves_quarantine_at_once(pool: Pool) -> None:
    array = filled(pool, 1000, 5)
    (region,) = pool._regions
    region.hold()
    quarantine = Quarantine()
    quarantine.outputs.append(Output(array, region, AbandonedCall()))
    assert quarantine.release([array]) is None
    assert region.is_alive  # the pool's own lease goes on


def test_the_writes_of_a_forked_child_do_not_reach_its_parent() -> None:
    code = """if True:
        import os, numpy, bngrad._shared_memory.pool
        array = bngrad._shared_memory.pool.Pool(None).empty((1000,), numpy.dtype("u1"))
        array[:] = 5
        child = os.fork()
        if child == 0:
            array[:] = 6
            os._exit(0)
        os.waitpid(child, 0)
        assert (array == 5).all()
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_server_sees_what_is_in_a_leased_array() -> None:
    with closing(LeasesInThread()) as server, closing(Pool(server.path)) as pool:
        pool.empty((10,), BYTE)
        array = filled(pool, 100, 9)
        key, offset = place_of(pool, array)
        region = server.regions._by_key[key]
        assert os.pread(region.fd, 100, offset) == bytes([9]) * 100


def test_a_lease_ends_with_its_pool() -> None:
    with closing(LeasesInThread()) as server:
        with closing(Pool(server.path)) as pool:
            array = filled(pool, 100, 1)
            assert server.regions.nbytes == REGION_NBYTES
        assert server.ended.wait(SECONDS)
        assert (array == 1).all()


def test_checking_the_leases_of_a_live_server_removes_nothing_and_does_not_wait(pool: Pool) -> None:
    array = filled(pool, 100, 1)
    for _ in range(1000):  # with a wait in each this would take long
        assert not pool.check()
    assert pool.locate(array) is not None


def test_a_dead_servers_regions_are_removed_and_its_arrays_remain() -> None:
    with closing(LeasesInThread()) as server, closing(Pool(server.path)) as pool:
        array, gone = filled(pool, 100, 1), filled(pool, 3000, 2)
        server.close()
        del gone  # its block is not collected before its region is removed
        assert pool.check()
        assert not pool.check()
        assert pool.locate(array) is None
        assert (array == 1).all()
        del array
        with pytest.raises(LeaseError, match="the server leases no memory: "):
            pool.empty((100,), BYTE)
        with closing(LeasesInThread()) as another:
            pool._path = another.path
            assert pool.locate(filled(pool, 100, 2)) is not None


def test_a_refusal_is_a_lease_error_in_the_servers_words() -> None:
    with closing(LeasesInThread(100 * MIB)) as server, closing(Pool(server.path)) as pool:
        kept = filled(pool, 60 * MIB, 1)
        for _ in range(3):
            with pytest.raises(LeaseError, match="a region of 67108864 bytes is more than is left of the 104857600 b"):
                pool.empty((10 * MIB,), BYTE)
        assert len(server.leased) == 1
        assert (kept[:: 2**12] == 1).all()
        del kept
        assert pool.locate(pool.empty((10 * MIB,), BYTE)) is not None


def test_a_path_without_a_server_is_a_lease_error(tmp_path: Path) -> None:
    with closing(Pool(str(tmp_path / "regions"))) as pool, pytest.raises(LeaseError, match="No such file or directory"):
        pool.empty((1,), BYTE)


def test_a_server_that_does_not_answer_delays_no_call_beyond_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "_LEASE_TIMEOUT_S", 2 * SECONDS)
    path = str(tmp_path / "regions")
    with ExitStack() as stack, closing(Pool(path)) as pool, ThreadPoolExecutor(1) as threads:
        silent = stack.enter_context(socket.socket(socket.AF_UNIX))
        silent.bind(path)
        silent.listen()
        begin = time.monotonic()
        with pytest.raises(LeaseLateError):
            pool.empty((1,), BYTE, Deadline.after(0.1))
        assert time.monotonic() - begin < SECONDS  # less than the timeout of a lease
        cancellation = Cancellation()
        waiting = threads.submit(pool.empty, (1,), BYTE, Deadline.after(SECONDS), cancellation)
        for _ in range(2):
            stack.enter_context(silent.accept()[0]).recv(1)
        pool.close()  # waits for no lease
        cancellation.cancel()
        with pytest.raises(LeaseError):
            waiting.result(SECONDS)
        with closing(Pool(path)) as another, pytest.raises(LeaseError, match="was cancelled"):
            another.empty((1,), BYTE, Deadline.after(SECONDS), cancellation)


def test_after_an_interrupt_other_threads_get_memory(pool: Pool) -> None:
    with interrupt_after("acquire"):
        pool.empty((1,), BYTE)
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(pool.empty, (1,), BYTE, Deadline.after(2)).result(SECONDS).size == 1


def test_an_interrupt_at_any_step_loses_no_memory() -> None:
    for step in itertools.count():
        with closing(Pool(None)) as pool:
            first = pool.empty((1000,), BYTE)
            cuts = interrupt_at(step, lambda: pool.empty((2000,), BYTE))
            reuses = interrupt_at(step, lambda: pool.empty((2000,), BYTE))
            arrays = [first, *(pool.empty((2000,), BYTE) for _ in range(3))]
            assert sorted(place_of(pool, array)[1] for array in arrays) == [0, 1024, 3072, 5120]
            del first, arrays
            assert place_of(pool, pool.empty((REGION_NBYTES,), BYTE))[1] == 0
            assert len(pool._regions) == 1
        if not cuts and not reuses:
            break
    assert step > 10


def test_a_server_that_answers_nothing_for_long_is_unreachable_rather_than_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "_LEASE_TIMEOUT_S", 0.05)
    path = str(tmp_path / "regions")
    with socket.socket(socket.AF_UNIX) as silent, closing(Pool(path)) as pool:
        silent.bind(path)
        silent.listen()
        with pytest.raises(UnreachableError, match="timed out"):
            pool.empty((1,), BYTE, Deadline.after(SECONDS))


def test_memory_of_a_server_that_too_many_clients_ask_for_it_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "regions")
    with full_listener(path), closing(Pool(path)) as pool, pytest.raises(LeaseRefusedError, match="too many clients"):
        pool.empty((1,), BYTE)


def test_a_cancelled_call_does_not_wait_for_the_memory_of_another_call(tmp_path: Path) -> None:
    path = str(tmp_path / "regions")
    with ExitStack() as stack, closing(Pool(path)) as pool, ThreadPoolExecutor(2) as threads:
        silent = stack.enter_context(socket.socket(socket.AF_UNIX))
        silent.bind(path)
        silent.listen()
        first, second = Cancellation(), Cancellation()
        leasing = threads.submit(pool.empty, (1,), BYTE, ENDLESS, first)
        stack.enter_context(silent.accept()[0]).recv(1)
        waiting = threads.submit(pool.empty, (1,), BYTE, ENDLESS, second)
        second.cancel()
        with pytest.raises(LeaseError, match="was cancelled"):
            waiting.result(SECONDS)
        with pytest.raises(LeaseLateError, match="another call still waits for memory"):  # not by a lease of its own
            pool.empty((1,), BYTE, Deadline.after(0.01))
        assert not leasing.done()
        first.cancel()


def test_a_free_block_is_had_at_once_while_another_call_leases_memory(tmp_path: Path) -> None:
    path = str(tmp_path / "regions")
    with ExitStack() as stack, closing(LeasesInThread()) as server, closing(Pool(server.path)) as pool:
        threads = stack.enter_context(ThreadPoolExecutor(1))
        silent = stack.enter_context(socket.socket(socket.AF_UNIX))
        silent.bind(path)
        silent.listen()
        kept = filled(pool, 1000, 1)
        pool._path = path
        cancellation = Cancellation()
        leasing = threads.submit(pool.empty, (REGION_NBYTES,), BYTE, ENDLESS, cancellation)
        stack.enter_context(silent.accept()[0]).recv(1)
        assert not np.may_share_memory(pool.empty((1000,), BYTE, Deadline.after(1.0)), kept)
        assert not leasing.done()
        cancellation.cancel()


@contextmanager
def no_file_descriptors() -> Iterator[None]:
    """Lets the process open no more files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open("/dev/null", os.O_RDONLY)
    os.close(lowest)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_without_file_descriptors_no_memory_is_leased() -> None:
    with closing(LeasesInThread()) as server, closing(Pool(server.path)) as pool:
        with no_file_descriptors(), pytest.raises(LeaseError, match="there is no socket to ask for memory by"):
            pool.empty((1,), BYTE)
        assert pool.empty((1,), BYTE).size == 1


def test_memory_for_which_no_file_descriptor_is_left_is_not_leased(tmp_path: Path) -> None:
    path = str(tmp_path / "regions")
    with (
        socket.socket(socket.AF_UNIX) as listener,
        FileIO(os.memfd_create("region"), "r+") as file,
        closing(Pool(path)) as pool,
        ThreadPoolExecutor(1) as threads,
    ):
        listener.bind(path)
        listener.listen()
        leasing = threads.submit(pool.empty, (1,), BYTE)
        with listener.accept()[0] as lease:
            lease.recv(1024)
            with no_file_descriptors():
                socket.send_fds(lease, [bytes(KEY_NBYTES)], [file.fileno()])
                with pytest.raises(LeaseError, match="no file descriptor left for the server's memory"):
                    leasing.result(SECONDS)
            assert lease.recv(1) == b""


def test_a_pool_that_grows_gives_its_small_regions_back_first() -> None:
    """A server counts memory that a client still maps, also after the lease."""
    with closing(LeasesInThread(6 * REGION_NBYTES)) as leases, closing(Pool(leases.path)) as pool:
        for regions in (1, 2, 3):
            pool.empty((regions * REGION_NBYTES,), BYTE)
        assert leases.regions.nbytes == 3 * REGION_NBYTES


def test_a_region_that_is_reused_for_other_sizes_lends_no_block_twice(pool: Pool) -> None:
    def fill(nbytes: int) -> list[Any]:
        return [pool.empty((nbytes,), BYTE) for _ in range(REGION_NBYTES // nbytes)]

    fill(REGION_NBYTES // 4)
    large = pool.empty((REGION_NBYTES // 2,), BYTE)
    small = pool.empty((REGION_NBYTES // 4,), BYTE)
    assert not np.may_share_memory(large, small)


def test_memory_that_was_leased_while_the_pool_closed_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(LeasesInThread()) as server, closing(Pool(server.path)) as pool:

        def lease(*arguments: Any) -> Any:
            leased = lease_module.lease_region(*arguments)
            pool.close()
            return leased

        monkeypatch.setattr(pool_module, "lease_region", lease)
        with pytest.raises(LeaseError, match="the client was closed"):
            pool.empty((1,), BYTE)
        assert server.ended.wait(SECONDS)


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # it closes itself
def test_ctrl_c_as_memory_is_leased_loses_no_descriptor() -> None:
    def interrupt(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        if frame.f_code is not socket.recv_fds.__code__:
            return None
        if event == "return":
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)
        return interrupt

    with closing(LeasesInThread()) as server, closing(Pool(server.path)) as pool:
        before = len(os.listdir("/proc/self/fd"))
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's background ignores it
        sys.settrace(interrupt)
        try:
            with pytest.raises(KeyboardInterrupt):
                pool.empty((1,), BYTE)
        finally:
            sys.settrace(None)
            signal.signal(signal.SIGINT, handler)
        assert server.ended.wait(SECONDS)
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_closing_ends_the_thread_that_helps_to_copy() -> None:
    before = set(threading.enumerate())
    pool = Pool(None)
    pool.copies([np.zeros(8 * MIB, np.uint8)], ENDLESS, Cancellation())
    (helper,) = set(threading.enumerate()) - before
    pool.close()
    helper.join(SECONDS)
    assert not helper.is_alive()


@pytest.mark.parametrize("nbytes", [2**62, 2**63])
def test_memory_that_no_host_has_is_a_memory_error(nbytes: int) -> None:
    with closing(Pool(None)) as pool, pytest.raises(MemoryError, match=f"no {nbytes} bytes for an array"):
        pool.empty((nbytes,), BYTE)


def test_leased_memory_that_cannot_be_mapped_is_a_lease_error_and_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    near, far = socket.socketpair()
    monkeypatch.setattr(pool_module, "lease_region", lambda *_: (near, bytes(16), FileIO("/dev/null")))
    with far, closing(Pool("path")) as pool:
        with pytest.raises(LeaseError, match="the leased memory cannot be mapped: "):
            pool.empty((1,), BYTE)
        assert far.recv(1) == b""


def test_a_lease_is_asked_for_with_the_clients_token(tmp_path: Path) -> None:
    path = str(tmp_path / "regions")
    credentials = Credentials(Security(token="secret"), "unix:/a")  # noqa: S106 - used nowhere else
    with socket.socket(socket.AF_UNIX) as listener, closing(Pool(path, credentials)) as pool:
        listener.bind(path)
        listener.listen()
        with ThreadPoolExecutor(1) as threads:
            leasing = threads.submit(pool.empty, (1,), BYTE)
            with listener.accept()[0] as lease:
                assert unpack_request(lease.recv(1024)) == (REGION_NBYTES, "Bearer secret")
            with pytest.raises(LeaseEndedError):
                leasing.result(SECONDS)


def test_a_refusal_as_long_as_a_key_is_no_lease(tmp_path: Path) -> None:
    path = str(tmp_path / "regions")
    with socket.socket(socket.AF_UNIX) as listener, closing(Pool(path)) as pool, ThreadPoolExecutor(1) as threads:
        listener.bind(path)
        listener.listen()
        leasing = threads.submit(pool.empty, (1,), BYTE)
        with listener.accept()[0] as lease:
            lease.recv(1024)
            lease.send(b"no memory today.")
            with pytest.raises(LeaseRefusedError, match=r"^no memory today\.$"):
                leasing.result(SECONDS)


def test_a_block_is_cut_off_one_region_alone() -> None:
    with closing(Pool(None)) as pool:
        kept = [pool.empty((40 * MIB,), BYTE) for _ in range(2)]
        before = sum(region.used for region in pool._regions)
        kept.append(pool.empty((1000,), BYTE))
        assert len(pool._regions) == 2
        assert sum(region.used for region in pool._regions) == before + 1024


def test_closing_goes_on_while_the_last_array_in_a_region_is_just_going(pool: Pool) -> None:
    pool.empty((1000,), BYTE)
    (region,) = pool._regions
    going = np.frombuffer(region.memory, np.uint8)
    pool.close()
    assert not pool._regions
    assert going[0] == 0
