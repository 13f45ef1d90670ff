"""From a valid request to its results: staging, queue and workers behind one call that knows no gRPC."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from bngrad_kernels.problem import Array, Problem
from bngrad_kernels.spec import Spec
from bngrad_server.arena import Arena
from bngrad_server.batching import Batcher, Job
from bngrad_server.config import ServerConfig
from bngrad_server.pool import WorkerPool
from bngrad_server.staging import staged_nbytes, staged_problem


@dataclass(frozen=True, slots=True)
class Request:
    """A valid request; the arrays may be views of the received message.

    Attributes:
        spec: What to compute; gives shape and dtype of every array.
        y_backprop: See `bngrad_kernels.problem.Problem`, as for the others.
        x: The input of the forward pass.
        scale: None counts as ones.
        reserve_space_1: The mean.
        reserve_space_2: The variance or inverse standard deviation.
    """

    spec: Spec
    y_backprop: Array
    x: Array
    scale: Array | None
    reserve_space_1: Array
    reserve_space_2: Array


class Engine:
    """The arena, the batcher and the worker pool of a server."""

    def __init__(self, config: ServerConfig, on_change: Callable[[], None]) -> None:
        self.arena = Arena(config.arena_bytes)
        self.batcher = Batcher(config.max_batch_jobs, config.max_batch_bytes)
        self.pool = WorkerPool(_devices(config.device), config.threads, self.arena, self.batcher, on_change)

    @contextmanager
    def computed(
        self, request: Request, timeout_s: float | None, on_end: Callable[[Callable[[], None]], bool]
    ) -> Iterator[Problem]:
        """Computes a request, and lends its results until the block ends.

        Args:
            request: What to compute.
            timeout_s: How long that may take; None means for ever.
            on_end: Registers what to call should the caller lose interest; False if that has happened already.

        Yields:
            The problem in the arena, with its outputs written.

        Raises:
            ArenaTooSmallError: The request is larger than the arena.
            TimeoutError: It took too long.
            concurrent.futures.CancelledError: The caller lost interest, or the server is stopping.
            ComputeError: No worker could compute it.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        nbytes = staged_nbytes(request.spec)
        block = self.arena.allocate(nbytes, timeout_s)
        job = Job(request.spec, block.offset, nbytes, has_scale=request.scale is not None)
        try:
            if not on_end(job.abandon):
                job.abandon()
            problem = staged_problem(self.arena.buffer, block.offset, request.spec, has_scale=job.has_scale)
            _stage(request, problem)
            self.batcher.put(job)
            _wait(job, deadline)
            yield problem
        finally:
            # A job that runs keeps its memory until the worker is done with it, whoever still waits.
            job.abandon()
            job.done.add_done_callback(lambda _: self.arena.free(block))

    def close(self) -> None:
        """Ends the workers and gives up the arena."""
        self.pool.close()
        self.arena.close()


def _devices(device: str) -> list[str]:
    return ["cpu"] if device == "auto" else [device]


def _wait(job: Job, deadline: float | None) -> None:
    try:
        job.done.result(None if deadline is None else deadline - time.monotonic())
    except concurrent.futures.TimeoutError as error:  # a TimeoutError itself only from Python 3.11 on
        raise TimeoutError("the request was not computed in time") from error


def _stage(request: Request, problem: Problem) -> None:
    """The one copy of a request's tensors; NumPy releases the interpreter lock meanwhile."""
    np.copyto(problem.y_backprop, request.y_backprop)
    np.copyto(problem.x, request.x)
    np.copyto(problem.reserve_space_1, request.reserve_space_1)
    np.copyto(problem.reserve_space_2, request.reserve_space_2)
    if problem.scale is not None and request.scale is not None:
        np.copyto(problem.scale, request.scale)
