"""Every transport gives the same bits, whatever the layout and place of the arrays."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.integration.problems import Case, Inputs, assert_same_bits, random_inputs
from tests.servers import DEVICE, ONE_WORKER, Transport, descriptors_of

import bngrad
import bngrad.aio
from bngrad_cli.embedded import EmbeddedServer
from bngrad_kernels.problem import Array
from bngrad_kernels.spec import BFLOAT16, FLOAT16, FLOAT32
from bngrad_wire.token_format import new_token

DTYPES = [FLOAT16, BFLOAT16, FLOAT32]
CASES = [
    Case("v2", "NHWC", (4, 9, 9, 7)),
    Case("v2", "NCHW", (4, 7, 9, 9)),
    Case("v3", "NDHWC", (2, 3, 9, 9, 7)),
    Case("v3", "NCDHW", (2, 7, 3, 9, 9)),
    Case("onednn", "NXC", (40, 7)),
    Case("onednn", "NCX", (3, 7, 2, 9, 9)),
    # Nothing, no channels, one element.
    Case("v2", "NHWC", (0, 9, 9, 7)),
    Case("v3", "NCHW", (4, 7, 0, 9)),
    Case("v3", "NHWC", (4, 9, 9, 0)),
    Case("onednn", "NCX", (4, 0, 9)),
    Case("v2", "NHWC", (1, 1, 1, 1)),
    Case("onednn", "NXC", (1, 1)),
    # Just below, at and above 32 KiB and 1 MiB of each dtype.
    *(
        Case(op, data_format, shape)
        for elements in (2**13, 2**14, 2**18, 2**19)
        for op, data_format, shape in (
            ("v2", "NHWC", (elements - 1, 1, 1, 1)),
            ("v3", "NCHW", (elements // 32, 32, 1, 1)),
            ("onednn", "NCX", (1, 1, elements + 1)),
        )
    ),
]
MOST_RUNS = 20
SIZES = [Case("v2", "NHWC", shape) for shape in [(2, 9, 9, 7), (4, 33, 33, 7), (8, 65, 65, 9)]]


@pytest.fixture(scope="module")
def unary(server: EmbeddedServer) -> Iterator[bngrad.Client]:
    """The reference for the others: one grpcio message each way."""
    with bngrad.Client(server.target, transport="unary") as client:
        yield client


@functools.cache
def inputs_of(case: Case, dtype: np.dtype[Any]) -> Inputs:
    return random_inputs(case.spec(dtype))


@functools.cache
def expected(unary: bngrad.Client, case: Case, dtype: np.dtype[Any]) -> tuple[Any, ...]:
    outputs: tuple[Any, ...] = case.run(unary, inputs_of(case, dtype))
    return outputs


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op}-{case.data_format}-{case.shape}")
def test_every_transport_gives_the_same_bits(client: bngrad.Client, unary: bngrad.Client, case: Case) -> None:
    for dtype in DTYPES:
        assert_same_bits(case.run(client, inputs_of(case, dtype)), expected(unary, case, dtype))


async def test_every_transport_of_the_asynchronous_client_gives_the_same_bits(
    target: str, transport: Transport, unary: bngrad.Client
) -> None:
    problems = [(case, dtype) for case in CASES for dtype in DTYPES]
    async with bngrad.aio.Client(target, transport=transport) as client:
        shared = await client.empty((4, 33, 33, 7))
        answers = await asyncio.gather(*(case.run(client, inputs_of(case, dtype)) for case, dtype in problems))
        assert (await SIZES[1].run(client, inputs_of(SIZES[1], FLOAT32), shared))[0] is shared
    for (case, dtype), answer in zip(problems, answers, strict=True):
        assert_same_bits(answer, expected(unary, case, dtype))
    assert_same_bits((shared,) * 3, (expected(unary, SIZES[1], FLOAT32)[0],) * 3)


def in_shared_memory(client: bngrad.Client, array: Array) -> Array:
    shared = client.empty(array.shape, array.dtype)
    shared[...] = array
    return shared


INPUT_KINDS: dict[str, Callable[[bngrad.Client, Array], Array]] = {
    "ordinary": lambda client, array: array,
    "shared": in_shared_memory,
    "shared, reversed": lambda client, array: in_shared_memory(client, array[..., ::-1])[..., ::-1],
    "fortran": lambda client, array: np.asfortranarray(array),
    "strided": lambda client, array: np.repeat(array, 2, axis=0)[::2],
    "big-endian": lambda client, array: array.astype(array.dtype.newbyteorder(">")),
}
OUT_KINDS: dict[str, Callable[[bngrad.Client, tuple[int, ...]], Array | None]] = {
    "none": lambda client, shape: None,
    "ordinary": lambda client, shape: np.empty(shape, np.float32),
    "shared": lambda client, shape: client.empty(shape),
    "shared, strided": lambda client, shape: client.empty((*shape[:-1], 2 * shape[-1]))[..., ::2],
    "fortran": lambda client, shape: np.empty(shape, np.float32, order="F"),
}


@pytest.mark.parametrize("input_kind", INPUT_KINDS)
@pytest.mark.parametrize("case", SIZES, ids=lambda case: str(case.shape))
def test_arrays_may_lie_anywhere_in_any_layout(
    client: bngrad.Client, unary: bngrad.Client, case: Case, input_kind: str
) -> None:
    inputs = inputs_of(case, FLOAT32)
    changed = Inputs(*(INPUT_KINDS[input_kind](client, array) for array in inputs))
    for make_out in OUT_KINDS.values():
        out = make_out(client, case.shape)
        outputs = case.run(client, changed, out)
        assert out is None or outputs[0] is out
        assert_same_bits(outputs, expected(unary, case, FLOAT32))
    for ours, theirs in zip(changed, inputs, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("input_kind", ["ordinary", "shared"])
@pytest.mark.parametrize("transport", ["auto", "stream", "shared"])
async def test_the_event_loop_never_waits_for_a_tensor(
    server: EmbeddedServer, transport: Transport, input_kind: str
) -> None:
    """At least one run has no long gap: a busy machine delays some runs, blocking code delays all."""
    shape = (128, 64, 64, 64)  # 128 MiB
    stats = np.ones(64, np.float32)
    longest_gaps_s: list[float] = []
    async with bngrad.aio.Client(server.target, transport=transport) as client:
        y_backprop, x = [
            np.ones(shape, np.float32) if input_kind == "ordinary" else await client.empty(shape) for _ in range(2)
        ]
        y_backprop[...] = x[...] = 1
        while len(longest_gaps_s) < MOST_RUNS and min(longest_gaps_s, default=1.0) >= 0.05:
            longest_gap_s, last = 0.0, time.perf_counter()
            call = asyncio.create_task(client.fused_batch_norm_grad_v2(y_backprop, x, stats, stats, stats))
            while not call.done():
                await asyncio.sleep(0.001)
                now = time.perf_counter()
                longest_gap_s, last = max(longest_gap_s, now - last), now
            await call
            longest_gaps_s.append(longest_gap_s)
    assert min(longest_gaps_s) < 0.05, longest_gaps_s


@pytest.mark.parametrize("has_tokens", [False, True], ids=["any client", "tokens tell clients apart"])
def test_a_server_lends_large_responses_to_its_users_clients_unless_tokens_tell_them_apart(
    has_tokens: bool, tmp_path: Path
) -> None:
    token, line = new_token("alice")
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{line}\n")
    x = np.random.default_rng(0).standard_normal((2, 128, 128, 64), np.float32)  # 8 MiB
    stats = np.ones(64, np.float32)
    options = (*ONE_WORKER, *(("--token-file", str(tokens)) if has_tokens else ()))
    with (
        EmbeddedServer(device=DEVICE, options=options) as server,
        bngrad.Client(server.target, transport="stream", token=token) as client,
        bngrad.Client(server.target, transport="shared", token=token) as shared,
    ):
        expected = shared.fused_batch_norm_grad_v2(x, x, stats, stats, stats)
        before = pipes_of(server)
        for _ in range(3):
            assert_same_bits(client.fused_batch_norm_grad_v2(x, x, stats, stats, stats), expected)
        assert len(pipes_of(server) - before) == (0 if has_tokens else 1)


def pipes_of(server: EmbeddedServer) -> set[str]:
    return {target for target in descriptors_of(server.process.pid).values() if target.startswith("pipe:")}
