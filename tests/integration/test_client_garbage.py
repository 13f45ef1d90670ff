"""Clients and their calls leave no reference cycles for the garbage collector."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from tests.servers import DEVICE, ONE_WORKER, TRANSPORTS, Transport, endpoints_of, worker_pid

import bngrad
from bngrad import aio
from bngrad_cli.embedded import EmbeddedServer
from bngrad_wire.lease_protocol import REGIONS

SHAPES = [(2, 2, 2, 4), (4, 32, 32, 32)]
TIMES = 2
STOPPED_S = 0.05
"""The timeout of calls while the worker is stopped."""
REFUSED_S = 0.5
"""How long the server leases no memory: a few attempts of a call."""
OURS = {"bngrad", "bngrad_protos", "bngrad_wire", "mmap", "numpy"}
"""Modules whose objects must not be in cycles; asyncio's own event loops are."""
Calls: TypeAlias = Callable[[str, Transport, tuple[int, ...], Callable[[bool], None]], None]


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer(device=DEVICE, options=ONE_WORKER) as server:
        yield server


def tensors(shape: tuple[int, ...], wrong: int = 0) -> tuple[Any, ...]:
    x, stats = np.ones(shape, np.float32), np.ones(shape[-1], np.float32)
    return x, x, np.ones(shape[-1] + wrong, np.float32), stats, stats


def sync_calls(target: str, transport: Transport, shape: tuple[int, ...], stop: Callable[[bool], None]) -> None:
    """Calls that are answered, refused or time out, with a closed client and with one that reaches no server."""
    client = bngrad.Client(target, transport=transport)
    client.fused_batch_norm_grad_v2(*tensors(shape))
    with pytest.raises(bngrad.InvalidArgumentError):
        client.fused_batch_norm_grad_v2(*tensors(shape, wrong=1))
    stop(True)
    for timeout in (STOPPED_S, 1e-6):
        with pytest.raises(bngrad.DeadlineExceededError):
            client.fused_batch_norm_grad_v2(*tensors(shape), timeout=timeout)
    stop(False)
    client.fused_batch_norm_grad_v2(*tensors(shape))
    client.close()
    with pytest.raises(bngrad.ClientClosedError):
        client.server_info()
    with pytest.raises(bngrad.UnavailableError), bngrad.Client("127.0.0.1:1", transport=transport) as nowhere:
        nowhere.fused_batch_norm_grad_v2(*tensors(shape))


def aio_calls(target: str, transport: Transport, shape: tuple[int, ...], stop: Callable[[bool], None]) -> None:
    """Tasks that are cancelled before and during their call, and others that are not."""

    async def calls() -> None:
        async with aio.Client(target, transport=transport) as client:
            await client.fused_batch_norm_grad_v2(*tensors(shape))
            with pytest.raises(bngrad.InvalidArgumentError):
                await client.fused_batch_norm_grad_v2(*tensors(shape, wrong=1))
            stop(True)
            for wait_s, out in ((0, None), (STOPPED_S, None), (STOPPED_S, np.empty(shape, np.float32))):
                task = asyncio.ensure_future(client.fused_batch_norm_grad_v2(*tensors(shape), out=out))
                await asyncio.sleep(wait_s)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            with pytest.raises(bngrad.DeadlineExceededError):
                await client.fused_batch_norm_grad_v2(*tensors(shape), timeout=STOPPED_S)
            stop(False)
            await client.fused_batch_norm_grad_v2(*tensors(shape))

    asyncio.run(calls())


@pytest.mark.parametrize("shape", SHAPES, ids=["small", "large"])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("calls", [sync_calls, aio_calls])
def test_calls_leave_no_garbage_however_they_end(
    server: EmbeddedServer, calls: Calls, transport: Transport, shape: tuple[int, ...]
) -> None:
    worker = worker_pid(server)

    def stop(stopped: bool) -> None:
        os.kill(worker, signal.SIGSTOP if stopped else signal.SIGCONT)

    def call() -> None:
        calls(server.target, transport, shape, stop)

    call()
    try:
        with no_garbage():
            for _ in range(TIMES):
                call()
    finally:
        stop(False)


def test_a_call_that_is_answered_after_attempts_that_failed_leaves_no_garbage(server: EmbeddedServer) -> None:
    with no_garbage(), bngrad.Client(server.target, transport="shared") as client, ThreadPoolExecutor(1) as threads:
        with leasing_nothing(server):
            call = threads.submit(client.fused_batch_norm_grad_v2, *tensors(SHAPES[1]))
            time.sleep(REFUSED_S)
            assert not call.done()
        call.result()
        del call


@contextmanager
def leasing_nothing(server: EmbeddedServer) -> Iterator[None]:
    """Puts a socket that nobody can connect to in the place of the one that leases memory.

    The place is never empty, as a server that starts elsewhere removes the directories of servers that have gone.
    """
    regions = Path(endpoints_of(server.target).local_directory, REGIONS)
    real, useless = regions.with_suffix(".real"), regions.with_suffix(".useless")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams:
        datagrams.bind(str(useless))
        real.hardlink_to(regions)
        useless.rename(regions)
        try:
            yield
        finally:
            real.rename(regions)


@contextmanager
def no_garbage() -> Iterator[None]:
    """Checks that the block leaves no objects of ours to the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        assert [each for each in gc.garbage if type(each).__module__.partition(".")[0] in OURS] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
