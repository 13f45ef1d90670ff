"""What the model is fed with and checked against: times of requests of a real server, and a real fleet under load."""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from unittest import mock

import numpy as np
from benchmarks.balancing.servers import servers
from benchmarks.load import mix
from benchmarks.warm_server import WarmServer

import bngrad
from bngrad._balancing.upstream import Upstream

REPEATS = 5
DEVICE_MS = 20.0
SHAPE = (2, 8, 8, 16)
THREADS = 200


@dataclasses.dataclass(frozen=True)
class Times:
    """What requests take.

    Attributes:
        service_s: What the server needs for each, in seconds.
        overhead_s: What a call takes besides.
    """

    service_s: list[float]
    overhead_s: float


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a real fleet did: the fields of `benchmarks.fleet.model.Outcome` that a client sees."""

    goodput: float
    p50_s: float
    p99_s: float


def mix_times() -> Times:
    """Measures the requests of the mix of `benchmarks.load` one by one, through an idle server and the SDK."""
    medians: dict[str, float] = {}
    with (
        WarmServer(options=("--workers", "1")) as server,
        bngrad.Client(server.target) as client,
    ):
        for item in mix.MIXED:
            problem = mix.problem(item, 0)
            call = partial(
                client.fused_batch_norm_grad_v3,
                problem.y_backprop,
                problem.x,
                np.asarray(problem.scale),
                problem.reserve_space_1,
                problem.reserve_space_2,
                None,
                data_format="NHWC" if item.data_format == "NHWC" else "NCHW",
            )
            times = []
            for _ in range(REPEATS + 2):
                begin = time.perf_counter()
                call()
                times.append(time.perf_counter() - begin)
            medians[str(item)] = statistics.median(times[2:])
    overhead_s = min(medians.values())
    service = [max(medians[str(item)] - overhead_s, 1e-4) for item in mix.MIXED for _ in range(item.count)]
    return Times(service, overhead_s)


def device_times(target: str) -> Times:
    """Measures the requests of `run`, alone and at saturation."""
    with bngrad.Client(target) as client:
        call = _call(client)
        alone = []
        for _ in range(60):
            begin = time.perf_counter()
            call()
            alone.append(time.perf_counter() - begin)
        with ThreadPoolExecutor(4) as threads:
            begin = time.perf_counter()
            list(threads.map(lambda _: call(), range(200)))
            mean_s = (time.perf_counter() - begin) / 200
    overhead_s = max(statistics.mean(alone[10:]) - mean_s, 1e-4)
    return Times([max(each - overhead_s, 1e-4) for each in alone[10:]], overhead_s)


def run(
    targets: Sequence[str],
    *,
    clients: int,
    rate: float,
    seconds: float,
    warm_up_s: float,
    reports: bool,
) -> Measured:
    """Sends requests at random times, each from a random client, and returns what became of them.

    Args:
        targets: The servers.
        clients: How many clients, each with connections of its own.
        rate: Requests per second.
        seconds: How long.
        warm_up_s: How much at the beginning does not count.
        reports: Whether clients take servers' reports into account.
    """
    rng = random.Random(0)  # noqa: S311 - not a secret
    times: list[float] = []
    with ExitStack() as stack:
        if not reports:
            stack.enter_context(
                mock.patch.object(
                    Upstream,
                    "note",
                    lambda upstream, load, calls: setattr(upstream, "load", load),
                )
            )
        calls = [_call(stack.enter_context(bngrad.Client(list(targets), timeout=2.0))) for _ in range(clients)]
        threads = stack.enter_context(ThreadPoolExecutor(THREADS))
        for call in calls:
            call()
        begin = due = time.monotonic()
        offered = 0

        def send(call: Callable[[], object], due: float) -> None:
            call()
            if due >= begin + warm_up_s:
                times.append(time.monotonic() - due)

        while (due := due + rng.expovariate(rate)) < begin + seconds:
            time.sleep(max(due - time.monotonic(), 0.0))
            offered += due >= begin + warm_up_s
            threads.submit(send, rng.choice(calls), due)
        threads.shutdown(wait=True)
    return Measured(len(times) / offered, *(float(np.quantile(times, part)) for part in (0.5, 0.99)))


def _call(client: bngrad.Client) -> Callable[[], object]:
    x = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    ones = np.ones(SHAPE[-1], np.float32)
    return lambda: client.fused_batch_norm_grad_v2(x, x, ones, ones, ones)


def fleet(slowness: Sequence[int]) -> AbstractContextManager[list[str]]:
    """Runs a server for each number: its requests take that multiple of `DEVICE_MS`, without a processor."""
    return servers([DEVICE_MS * each for each in slowness])
