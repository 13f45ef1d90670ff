"""Programs that end, or are interrupted, while calls are under way."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from types import FrameType
from typing import Any

import numpy as np
import pytest
from tests.servers import (
    DEVICE,
    ONE_WORKER,
    TIMEOUT_S,
    TRANSPORTS,
    Transport,
    python,
    regions_of,
    wait_until,
    worker_pid,
)

import bngrad
from bngrad._shared_memory.quarantine import Output
from bngrad_cli.embedded import EmbeddedServer

BEGIN = """
import asyncio, os, sys, threading, time
import numpy as np
import bngrad
from bngrad import aio
os.dup2(1, 2)
target, transport = sys.argv[1:]
x, stats = np.ones((4, 32, 32, 32), np.float32), np.ones(32, np.float32)
tensors = x, x, stats, stats, stats
def say_ready_amid(calls):
    with bngrad.Client(target) as other:
        while other.server_info().requests < calls:
            time.sleep(0.001)
    print("ready", flush=True)
"""
THREADS = """
client = bngrad.Client(target, transport=transport, timeout=600)
for _ in range(3):
    threading.Thread(target=client.fused_batch_norm_grad_v2, args=tensors, daemon=True).start()
say_ready_amid(3)
sys.exit(3)
"""
LOOP_IN_A_THREAD = """
async def calls():
    async with aio.Client(target, transport=transport, timeout=600) as client:
        await asyncio.gather(*(client.fused_batch_norm_grad_v2(*tensors) for _ in range(3)))
threading.Thread(target=asyncio.run, args=(calls(),), daemon=True).start()
say_ready_amid(3)
sys.exit(3)
"""
CTRL_C = """
client = bngrad.Client(target, transport=transport, timeout=600)
threading.Thread(target=say_ready_amid, args=(1,)).start()
try:
    client.fused_batch_norm_grad_v2(*tensors)
except KeyboardInterrupt:
    print("interrupted", flush=True)
client.fused_batch_norm_grad_v2(*tensors)
print("answered")
"""


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer(device=DEVICE, options=ONE_WORKER) as server:
        yield server


@pytest.fixture
def stopped_worker(server: EmbeddedServer) -> Iterator[int]:
    """The server's only worker, stopped by SIGSTOP."""
    worker = worker_pid(server)
    os.kill(worker, signal.SIGSTOP)
    try:
        yield worker
    finally:
        os.kill(worker, signal.SIGCONT)


@pytest.mark.parametrize("transport", ["shared", "unary"])
@pytest.mark.parametrize("code", [THREADS, LOOP_IN_A_THREAD], ids=["threads", "loop in a thread"])
def test_a_program_ends_without_waiting_for_calls(
    server: EmbeddedServer, stopped_worker: int, code: str, transport: Transport
) -> None:
    with python(BEGIN + code, server.target, transport) as running:
        assert running.communicate(timeout=TIMEOUT_S)[0] == ""
        assert running.returncode == 3
    os.kill(stopped_worker, signal.SIGCONT)
    wait_until(lambda: regions_of(server.process.pid) == 0)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ctrl_c_ends_a_call_and_the_client_stays_usable(
    server: EmbeddedServer, stopped_worker: int, transport: Transport
) -> None:
    with python(BEGIN + CTRL_C, server.target, transport) as running:
        running.send_signal(signal.SIGINT)
        assert running.stdout is not None
        assert running.stdout.readline() == "interrupted\n"
        os.kill(stopped_worker, signal.SIGCONT)
        assert running.communicate(timeout=TIMEOUT_S)[0] == "answered\n"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Python drops some interrupts
def test_after_ctrl_c_at_any_step_the_client_stays_usable(server: EmbeddedServer) -> None:
    """Each interrupted call begins with quarantined memory, which it must release."""
    x, stats = np.random.default_rng(0).normal(size=(2, 3, 3, 4)).astype(np.float32), np.ones(4, np.float32)
    with bngrad.Client(server.target, transport="shared") as client:
        expected = client.fused_batch_norm_grad_v2(x, x, stats, stats, stats).x_backprop
        quarantine = client._calls._quarantine
        for steps in range(10_000):
            with pytest.raises(bngrad.DeadlineExceededError):
                client.fused_batch_norm_grad_v2(x, x, stats, stats, stats, timeout=1e-6)
            wait_until(lambda: all(map(is_releasable, quarantine.outputs)), poll_s=0)
            interrupted = interrupted_after(steps, client, x, x, stats, stats, stats)
            answer = client.fused_batch_norm_grad_v2(x, x, stats, stats, stats)
            np.testing.assert_array_equal(answer.x_backprop, expected)
            wait_until(lambda: quarantine.release([]) is None and quarantine.is_empty)
            if not interrupted:
                break
        assert steps > 100


def is_releasable(output: Output) -> bool:
    return output.call.is_over() and not output.region.is_in_use()


def interrupted_after(steps: int, client: bngrad.Client, *tensors: Any) -> bool:
    """Raises KeyboardInterrupt after ``steps`` function calls; returns whether the op had not ended by then."""
    left = steps

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal left
        # The places where Python itself looks for signals.
        module = frame.f_globals["__name__"].partition(".")[0]
        if event in ("call", "c_return") and module in ("bngrad", "bngrad_protos", "bngrad_wire", "socket"):
            left -= 1
            if left < 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        with suppress(KeyboardInterrupt):
            client.fused_batch_norm_grad_v2(*tensors)
    finally:
        sys.setprofile(None)
    return left < 0
