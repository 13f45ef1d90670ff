"""Memory and descriptors do not grow with the number of requests, and a request takes little more than its tensors."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import psutil
import pytest
from tests.integration.problems import Case, random_inputs
from tests.servers import ONE_WORKER, TRANSPORTS, Transport, wait_until, worker_pid

import bngrad
from bngrad_cli.embedded import EmbeddedServer

MIB = 2**20
THREADS = 4
REQUESTS, ROUNDS = 10_000, 10
ARENA_NBYTES = 16 * MIB
HEAP_NBYTES = 64 * MIB
LIBC = ctypes.CDLL(None)


@pytest.fixture
def memory_server() -> Iterator[EmbeddedServer]:
    """A server with room for a few requests, which touches all of its memory early."""
    options = (*ONE_WORKER, "--arena-bytes", str(ARENA_NBYTES), "--shared-bytes", str(300 * MIB))
    with EmbeddedServer(options=options) as server:
        yield server


def test_ten_thousand_requests_leave_memory_and_descriptors_as_they_were(memory_server: EmbeddedServer) -> None:
    """Sends each size by each transport, large requests less often to save time.

    Compares the minimum of several rounds, since what gRPC holds varies by up to 8 MiB. A server that kept the tensors
    of every twentieth request would still exceed the bound.
    """
    sizes = [1024] * 12 + [4096] * 12 + [16384] * 6 + [65536] * 2 + [262144]
    cases = [Case("v2", "NHWC", (elements // 64, 1, 1, 64)) for elements in sizes]
    problems = [random_inputs(case.spec()) for case in cases]
    processes = [psutil.Process(pid) for pid in (os.getpid(), memory_server.process.pid, worker_pid(memory_server))]
    with ExitStack() as stack:
        clients = [stack.enter_context(bngrad.Client(memory_server.target, transport=each)) for each in TRANSPORTS]
        threads = stack.enter_context(ThreadPoolExecutor(THREADS))
        all_of_the_arena = Case("v2", "NHWC", (ARENA_NBYTES // 4 // 64 // 3 - 64, 1, 1, 64))
        all_of_the_arena.run(clients[TRANSPORTS.index("stream")], random_inputs(all_of_the_arena.spec()))

        def run(number: int) -> None:
            which = number // len(clients) % len(cases)
            cases[which].run(clients[number % len(clients)], problems[which])

        rounds = []
        gc.collect()
        for _ in range(ROUNDS):
            list(threads.map(run, range(REQUESTS // ROUNDS)))
            LIBC.malloc_trim(0)  # what other tests have freed in this process, which it may return at any time
            rounds.append([(_resident_nbytes(each), each.num_fds()) for each in processes])
    for usage in zip(*rounds, strict=True):
        before, after = (tuple(map(min, zip(*part, strict=True))) for part in (usage[4:7], usage[7:]))
        assert after[0] - before[0] < 10 * MIB, rounds
        assert after[1] - before[1] <= 2, rounds


def _resident_nbytes(process: psutil.Process) -> int:
    """Returns a process's memory without that of files, which the system drops and reads again as it likes."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    sizes = {name: value for name, _, value in (line.partition(":") for line in lines)}
    return sum(int(sizes[name].split()[0]) for name in ("RssAnon", "RssShmem", "VmSwap")) * 1024


@pytest.mark.parametrize("transport", ["stream", "shared"])
@pytest.mark.parametrize("is_tcp", [True, False], ids=["tcp", "unix"])
def test_a_large_exchange_takes_little_more_memory_than_its_tensors(
    tmp_path: Path, transport: Transport, is_tcp: bool
) -> None:
    """Counts pages that front and worker share once: the smaller of what either has mapped."""
    shape = (128, 64, 64, 64)  # 128 MiB a tensor
    stats = np.ones(64, np.float32)
    tensor = np.ones(shape, np.float32)
    listen = "127.0.0.1:0" if is_tcp else f"unix:{tmp_path}/bngrad.sock"
    with (
        EmbeddedServer(listen, options=ONE_WORKER) as server,
        bngrad.Client(server.target, transport=transport) as client,
    ):
        pids = server.process.pid, worker_pid(server)
        begin = [(status(pid, "VmHWM"), status(pid, "RssShmem")) for pid in pids]
        client.fused_batch_norm_grad_v2(tensor, tensor, stats, stats, stats)
        end = [(status(pid, "VmHWM"), status(pid, "RssShmem")) for pid in pids]
    peaks = [after[0] - before[0] for before, after in zip(begin, end, strict=True)]
    shared = [after[1] - before[1] for before, after in zip(begin, end, strict=True)]
    assert max(peaks) > 300 * MIB
    assert sum(peaks) - min(shared) < 1.5 * 3 * 128 * MIB + 64 * MIB, (peaks, shared)


def test_what_a_large_message_took_is_given_back() -> None:
    tensor, stats = np.ones((2**18, 1, 1, 64), np.float32), np.ones(64, np.float32)  # 64 MiB a tensor
    options = (*ONE_WORKER, "--max-message-bytes", "256MiB", "--arena-bytes", "256MiB")
    with EmbeddedServer(options=options) as server, bngrad.Client(server.target, transport="unary") as client:
        client.fused_batch_norm_grad_v2(tensor, tensor, stats, stats, stats)
        tensors, message = 3 * tensor.nbytes, 2 * tensor.nbytes
        wait_until(lambda: status(server.process.pid, "RssShmem") < tensors + message // 2)
        assert status(server.process.pid, "RssAnon") < 100 * MIB


def test_a_server_has_one_heap(server: EmbeddedServer) -> None:
    """A thread that starts too early has a heap of its own, of which malloc_trim does not return all that is free."""
    case = Case("v2", "NHWC", (2, 8, 8, 16))
    for transport in TRANSPORTS:
        with bngrad.Client(server.target, transport=transport) as client:
            case.run(client, random_inputs(case.spec()))
    assert heaps_of_threads(server.process.pid) == []


def heaps_of_threads(pid: int) -> list[str]:
    """Returns the memory maps that are heaps of glibc for threads: aligned to 64 MiB, with the rest of it reserved."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    spans = [tuple(int(each, 16) for each in line.split()[0].split("-")) for line in lines]
    return [
        line
        for line, (begin, end), rest, (rest_begin, rest_end) in zip(lines, spans, lines[1:], spans[1:], strict=False)
        if " rw-p " in line and " ---p " in rest and end == rest_begin
        if begin % HEAP_NBYTES == 0 and rest_end == begin + HEAP_NBYTES
    ]


def status(pid: int, field: str) -> int:
    """Reads a field of a process's memory status, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
