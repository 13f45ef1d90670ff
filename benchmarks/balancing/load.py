"""Clients in processes of their own, whose callers make one call after the other."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import bngrad
from bngrad._balancing.upstream import Upstream
from bngrad_wire.load_report import LoadReport

SHAPES = {"small": (2, 8, 8, 16), "large": (32, 32, 32, 64)}
_SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Load:
    """What the clients do.

    Attributes:
        shape: The shape of the tensors.
        seconds: For how long.
        clients: How many client processes there are.
        callers: The threads of each client; each makes one call after the other.
        by_speed: Whether what servers report is taken into account.
        warm_up_s: How long the clients call before that.
    """

    shape: tuple[int, ...]
    seconds: float
    clients: int
    callers: int
    by_speed: bool = True
    warm_up_s: float = 3.0


@dataclass(frozen=True)
class Outcome:
    """What the calls took, in seconds, and how many were answered per second."""

    latencies_s: list[float]
    goodput: float

    def quantile(self, part: float) -> float:
        """Returns the latency that this part of the calls did not exceed, in milliseconds."""
        return float(np.quantile(self.latencies_s, part)) * 1e3


def run(targets: Sequence[str], load: Load) -> Outcome:
    """Has the clients call the servers, and returns the outcome of all."""
    with _SPAWN.Pool(load.clients) as processes:
        parts = processes.starmap(_call, [(list(targets), load, seed) for seed in range(load.clients)], 1)
    latencies = [latency for part in parts for latency in part]
    return Outcome(latencies, len(latencies) / load.seconds)


def _call(targets: list[str], load: Load, seed: int) -> list[float]:
    if not load.by_speed:
        Upstream.note = _ignore  # type: ignore[method-assign]
    rng = np.random.default_rng(seed)
    x = rng.normal(size=load.shape).astype(np.float32)
    stats = np.ones(load.shape[-1], np.float32)
    latencies: list[float] = []
    with bngrad.Client(targets) as client:

        def call() -> None:
            while (began := time.monotonic()) < end:
                client.fused_batch_norm_grad_v2(x, x, stats, stats, stats)
                if begin <= began and (now := time.monotonic()) <= end:
                    latencies.append(now - began)

        begin = time.monotonic() + load.warm_up_s
        end = begin + load.seconds
        threads = [threading.Thread(target=call) for _ in range(load.callers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return latencies


def _ignore(self: Upstream, load: LoadReport, calls: int) -> float | None:
    self.load = load
    return None
