"""A request gets the same bits alone and in any batch, on any worker, over any transport, after restarts."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.faults.server import RestartableServer
from tests.integration.problems import Case, Inputs, assert_same_bits, random_inputs
from tests.servers import TRANSPORTS, Transport

import bngrad
from bngrad_kernels.spec import TENSOR_DTYPES

MOST_AT_ONCE = 16
CASES = [
    ("v2", "NHWC", 4), ("v2", "NCHW", 4),
    ("v3", "NHWC", 4), ("v3", "NCHW", 4), ("v3", "NDHWC", 5), ("v3", "NCDHW", 5),
    ("onednn", "NXC", 2), ("onednn", "NXC", 3), ("onednn", "NCX", 4), ("onednn", "NXC", 5),
]  # fmt: skip
LARGE = [
    Case("v2", "NHWC", (16, 28, 28, 256)),
    Case("v3", "NCHW", (16, 256, 28, 28)),
    Case("v2", "NHWC", (64, 56, 56, 8)),
]
"""Large enough to be split among workers."""


class Call(NamedTuple):
    """A request, and the transport that it takes."""

    case: Case
    dtype: np.dtype[Any]
    seed: int
    transport: Transport

    def inputs(self) -> Inputs:
        return random_inputs(self.case.spec(self.dtype), self.seed)

    def run(self, clients: dict[Transport, bngrad.Client], inputs: Inputs) -> tuple[Any, ...]:
        outputs: tuple[Any, ...] = self.case.run(clients[self.transport], inputs)
        return outputs


@st.composite
def small_cases(draw: st.DrawFn) -> Case:
    op, data_format, rank = draw(st.sampled_from(CASES))
    return Case(op, data_format, tuple(draw(st.lists(st.integers(1, 20), min_size=rank, max_size=rank))))


calls = st.builds(
    Call,
    st.one_of(*[small_cases()] * 9, st.sampled_from(LARGE)),
    st.sampled_from(TENSOR_DTYPES),
    st.integers(0, 99),
    st.sampled_from(TRANSPORTS),
)


@pytest.fixture(scope="module")
def alone() -> Iterator[bngrad.Client]:
    """A client of a server with one worker of one thread, which computes one request at a time."""
    options = ("--workers", "1", "--threads", "1", "--max-batch-jobs", "1")
    with RestartableServer(options=options) as service, bngrad.Client(service.target, transport="unary") as client:
        yield client


@pytest.fixture(scope="module")
def service() -> Iterator[RestartableServer]:
    with RestartableServer() as service:
        yield service


@pytest.fixture(scope="module")
def clients(service: RestartableServer) -> Iterator[dict[Transport, bngrad.Client]]:
    with ExitStack() as stack:
        yield {each: stack.enter_context(bngrad.Client(service.target, transport=each)) for each in TRANSPORTS}


@given(st.lists(calls, min_size=1, max_size=MOST_AT_ONCE), st.integers(1, MOST_AT_ONCE), st.sampled_from([None, 0, 1]))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_request_gets_the_same_bits_as_alone(
    alone: bngrad.Client,
    service: RestartableServer,
    clients: dict[Transport, bngrad.Client],
    batch: list[Call],
    at_once: int,
    victim: int | None,
) -> None:
    inputs = [each.inputs() for each in batch]
    expected = [each.case.run(alone, own) for each, own in zip(batch, inputs, strict=True)]
    service.wait_until_whole()
    with ThreadPoolExecutor(at_once) as threads:
        answers = [threads.submit(each.run, clients, own) for each, own in zip(batch, inputs, strict=True)]
        if victim is not None:
            os.kill(service.workers()[victim], signal.SIGKILL)
        for answer, outputs in zip(answers, expected, strict=True):
            assert_same_bits(answer.result(), outputs)
