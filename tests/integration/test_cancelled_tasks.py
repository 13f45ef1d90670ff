"""Asynchronous calls that are cancelled at any moment."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from contextlib import suppress
from types import FrameType

import numpy as np
import pytest
from tests.monitoring.conftest import HTTP, http_of, samples
from tests.servers import DEVICE, PATIENT_SUPERVISOR, TIMEOUT_S, Transport, wait_until

import bngrad
from bngrad import aio
from bngrad._deadline import Cancellation, Deadline
from bngrad._requests import ops
from bngrad._requests.attributes import TensorFlowAttributes
from bngrad._requests.request import PreparedRequest
from bngrad._transports.selector import TransportSelector
from bngrad_cli.embedded import EmbeddedServer

MOMENTS = 16
STEPS = 7
AT_A_MUTEX_S = 0.05
SHAPE = (4, 64, 64, 32)
UNTOUCHED = -1.0
COUNTS = ("bngrad_requests_in_flight", "bngrad_queue_requests", "bngrad_arena_used_bytes", "bngrad_ahead_tensors")


@pytest.mark.parametrize("is_contiguous", [True, False], ids=["contiguous", "strided"])
def test_a_cancelled_call_no_longer_writes_its_output(
    server: EmbeddedServer, transport: Transport, is_contiguous: bool
) -> None:
    x = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    tensors = x, x, *np.ones((3, SHAPE[-1]), np.float32)
    out = np.empty(SHAPE, np.float32) if is_contiguous else np.empty((*SHAPE, 2), np.float32)[..., 0]

    async def calls() -> None:
        async with aio.Client(server.target, transport=transport, timeout=TIMEOUT_S) as client:
            expected = (await client.fused_batch_norm_grad_v2(*tensors)).x_backprop
            begin = time.monotonic()
            await client.fused_batch_norm_grad_v2(*tensors, out=out)
            seconds = time.monotonic() - begin
            for moment in range(MOMENTS):
                task = asyncio.ensure_future(client.fused_batch_norm_grad_v2(*tensors, out=out))
                await asyncio.sleep(1.2 * seconds * moment / MOMENTS)
                task.cancel()
                try:
                    await task
                except asyncio.CancelledError:
                    out[...] = UNTOUCHED
                    while client._calls._running:
                        await asyncio.sleep(0)
                    assert (out == UNTOUCHED).all()
            await client.fused_batch_norm_grad_v2(*tensors, out=out)
            np.testing.assert_array_equal(out, expected)

    asyncio.run(calls())


def test_cancelled_tasks_with_tensors_that_were_sent_ahead_leave_nothing_behind(transport: Transport) -> None:
    x, stats = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32), np.ones((3, SHAPE[-1]), np.float32)

    async def gradient(client: aio.Client) -> bytes:
        with await client.send_ahead(x) as handle:
            return (await client.fused_batch_norm_grad_v2(x, handle, *stats)).x_backprop.tobytes()

    async def calls(server: EmbeddedServer) -> None:
        async with aio.Client(server.target, transport=transport, timeout=TIMEOUT_S) as client:
            expected = await gradient(client)
            begin = time.monotonic()
            assert await gradient(client) == expected
            seconds = time.monotonic() - begin
            for moment in range(MOMENTS):
                tasks = [asyncio.ensure_future(gradient(client)) for _ in range(4)]
                await asyncio.sleep(2 * seconds * moment / MOMENTS)
                for task in tasks:
                    task.cancel()
                _, pending = await asyncio.wait(tasks, timeout=TIMEOUT_S)
                assert not pending
                assert await gradient(client) == expected
            wait_until(lambda: not client._calls._running)
            (upstream,) = client._calls._load_balancer._servers.values()
            assert upstream.in_flight == 0
            wait_until(lambda: not any(samples(http_of(server))[name, ()] for name in COUNTS))

    with EmbeddedServer(device=DEVICE, options=(*PATIENT_SUPERVISOR, *HTTP)) as server:
        asyncio.run(calls(server))


@pytest.mark.parametrize("transport", ["stream", "shared"])
def test_a_call_that_is_cancelled_at_any_step_leaves_every_transport_usable(
    server: EmbeddedServer, transport: Transport
) -> None:
    """Includes the request for the endpoints before the first call."""
    x, stats = np.random.default_rng(0).normal(size=(4, 32, 32, 32)).astype(np.float32), np.ones(32, np.float32)
    attributes = TensorFlowAttributes(1e-4, "NHWC", True, "variance", 0)
    request = ops.V2.prepare((x, x, stats, stats, stats), attributes, None)
    steps, was_cancelled = 0, True
    while was_cancelled:
        with bngrad.Client(server.target, transport=transport, timeout=TIMEOUT_S) as client:
            was_cancelled = cancelled_after(steps, client, request)
            answer = client.fused_batch_norm_grad_v2(x, x, stats, stats, stats)
            assert all(map(np.array_equal, answer[:3], client.fused_batch_norm_grad_v2(x, x, stats, stats, stats)[:3]))
            (upstream,) = client._calls._load_balancer._servers.values()
            assert isinstance(upstream.selector, TransportSelector)
            assert not upstream.selector._discovery._blocked
        steps += STEPS
    assert steps > 100 * STEPS


def cancelled_after(steps: int, client: bngrad.Client, request: PreparedRequest[bngrad.FusedBatchNormGradV2]) -> bool:
    """Cancels a call from another thread after ``steps`` function calls; returns whether it had not ended by then."""
    cancellation, left = Cancellation(), steps

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal left
        if frame.f_globals["__name__"].partition(".")[0] in ("bngrad", "bngrad_protos", "bngrad_wire", "socket"):
            left -= 1
            if left < 0:
                sys.setprofile(None)
                thread = threading.Thread(target=cancellation.cancel)
                thread.start()
                thread.join(AT_A_MUTEX_S)

    sys.setprofile(profile)
    try:
        with suppress(bngrad.UnavailableError):
            client._calls.run(request, Deadline.after(TIMEOUT_S), cancellation)
    finally:
        sys.setprofile(None)
    return left < 0
