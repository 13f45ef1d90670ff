"""A server with a GPU worker. `make gpu-test` runs this, and the tests of the ops and transports on such a server."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import psutil
import pytest
from tests.kernels.problems import DTYPES
from tests.servers import Transport

import bngrad
from bngrad_cli.embedded import EmbeddedServer
from bngrad_kernels import backends, tolerances
from bngrad_kernels.problem import Problem
from bngrad_kernels.spec import FLOAT32, ReserveSpace2Kind, Spec

DEVICE = os.environ.get("BNGRAD_TEST_DEVICE", "cpu")
FORMATS = {"NHWC": 3, "NCHW": 1, "NDHWC": 4, "NCDHW": 1}
SHAPES = [(4, 9, 9, 48), (2, 64, 28, 28), (1, 1, 1, 1), (0, 3, 3, 8), (4, 3, 3, 0), (2, 3, 7, 7, 40)]
CALLERS = 16

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cpu", reason="make gpu-test runs it, on a machine with a GPU"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer(device=DEVICE, options=("--arena-bytes", "1GiB")) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: EmbeddedServer) -> Iterator[bngrad.Client]:
    with bngrad.Client(server.target) as client:
        yield client


@pytest.mark.parametrize("transport", ["stream", "shared"])
def test_a_tensor_that_was_copied_ahead_gives_the_same_bits(server: EmbeddedServer, transport: Transport) -> None:
    y_backprop, x, scale, mean, variance = inputs_of(Spec(FLOAT32, (48, 56, 56, 64), 3))
    with bngrad.Client(server.target, transport=transport) as client:
        expected = client.fused_batch_norm_grad_v2(y_backprop, x, scale, mean, variance)
        for _ in range(20):
            with client.send_ahead(x) as handle:
                time.sleep(0.1)  # until it is there
                outputs = client.fused_batch_norm_grad_v2(y_backprop, handle, scale, mean, variance)
            assert [each.tobytes() for each in outputs] == [each.tobytes() for each in expected]


def calls() -> list[tuple[Spec, str]]:
    """Problems of every shape, format, dtype, mode and kind."""
    found = []
    for shape, (data_format, axis) in itertools.product(SHAPES, FORMATS.items()):
        if len(data_format) == len(shape):
            for dtype, is_training, kind in itertools.product(DTYPES, (True, False), ReserveSpace2Kind):
                spec = Spec(dtype, shape, axis, is_training=is_training, reserve_space_2_kind=kind)
                found.append((spec, data_format))
    return found


def inputs_of(spec: Spec) -> tuple[Any, ...]:
    rng = np.random.default_rng(spec.channels)
    tensors = (rng.normal(size=spec.shape).astype(spec.dtype) for _ in range(2))
    return (*tensors, *rng.uniform(0.5, 2, (3, spec.channels)).astype(np.float32))


def run(client: bngrad.Client, spec: Spec, data_format: str) -> tuple[Any, ...]:
    inputs: Any = (*inputs_of(spec), None, spec.epsilon, data_format, spec.is_training)
    return client.fused_batch_norm_grad_v3(*inputs, reserve_space_2_kind=spec.reserve_space_2_kind.value)[:3]


def bits(outputs: tuple[Any, ...]) -> list[bytes]:
    return [output.tobytes() for output in outputs]


def test_the_server_says_what_the_device_is(client: bngrad.Client) -> None:
    (device,) = client.server_info().devices
    print(device)
    assert (device.name, device.state, device.restarts) == (DEVICE, "ready", 0)
    assert device.memory_bytes > 2**30
    assert device.description


def test_gradients_are_within_their_bounds_and_have_the_kernels_bits(client: bngrad.Client) -> None:
    backend = backends.create(DEVICE)
    backend.warm_up()
    for spec, data_format in calls():
        inputs, outputs = inputs_of(spec), run(client, spec, data_format)
        errors, bounds = tolerances.errors(spec, inputs, outputs), tolerances.bounds(spec)
        assert all(error <= bound for error, bound in zip(errors, bounds, strict=True)), (spec, errors, bounds)
        problem = Problem.allocate(spec, *inputs)
        backend.run([problem])
        assert bits(outputs) == bits((problem.x_backprop, problem.scale_backprop, problem.offset_backprop)), spec


def test_any_mix_of_requests_has_the_bits_of_each_alone(client: bngrad.Client) -> None:
    problems = calls()
    alone = [bits(run(client, *problem)) for problem in problems]
    order = np.random.default_rng(0).permutation(3 * len(problems)) % len(problems)
    with ThreadPoolExecutor(CALLERS) as threads:
        answers = list(threads.map(lambda i: bits(run(client, *problems[i])), order))
    assert [answers[k] == alone[i] for k, i in enumerate(order)] == [True] * len(order)
    assert sum(client.server_info().batch_sizes[1:]) > 0, "no two requests were ever in one batch"


def test_no_request_is_lost_when_the_worker_is_killed() -> None:
    spec = Spec(FLOAT32, (32, 28, 28, 64), 3)
    with (
        EmbeddedServer(device=DEVICE, options=("--arena-bytes", "1GiB")) as server,
        bngrad.Client(server.target) as client,
        ThreadPoolExecutor(CALLERS) as threads,
    ):
        expected = bits(run(client, spec, "NHWC"))
        answers = [threads.submit(run, client, spec, "NHWC") for _ in range(64)]
        workers = psutil.Process(server.process.pid).children()
        next(each for each in workers if "bngrad_server.workers.main" in each.cmdline()).kill()
        assert all(bits(answer.result()) == expected for answer in answers)
        assert client.server_info().devices[0].restarts == 1
