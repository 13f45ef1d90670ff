"""Tasks that are cancelled at any moment of their call."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
from tests.integration.conftest import TIMEOUT_S, Transport

from bngrad import aio
from bngrad_server.embedded import EmbeddedServer

MOMENTS = 16
SHAPE = (4, 64, 64, 32)
UNTOUCHED = -1.0


@pytest.mark.parametrize("is_contiguous", [True, False], ids=["contiguous", "strided"])
def test_what_a_cancelled_call_was_to_write_is_the_callers_again(
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
                    while client._caller._running:
                        await asyncio.sleep(0)
                    assert (out == UNTOUCHED).all()
            await client.fused_batch_norm_grad_v2(*tensors, out=out)
            np.testing.assert_array_equal(out, expected)

    asyncio.run(calls())
