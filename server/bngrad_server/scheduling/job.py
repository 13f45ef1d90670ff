"""A job: a staged request on its way through the queue and a worker."""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from bngrad_kernels.spec import Spec
from bngrad_server.workers.ipc import Task

if TYPE_CHECKING:
    from bngrad_server.scheduling.batch import Worker

KernelKey: TypeAlias = tuple[np.dtype[Any], bool, bool, int]
"""What jobs of one launch have in common: dtype, whether channels come last, mode, order."""


class JobState(enum.Enum):
    """Where a job is."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


class Job:
    """A staged request.

    Attributes:
        spec: What to compute.
        task: Where it lies.
        nbytes: The size of its tensors.
        kernel_key: Jobs of one key can share a launch.
        client: Who asked; clients share the workers evenly.
        priority: How much sooner it is wanted than others.
        deadline: When whoever asked loses patience, on the monotonic clock; None means never.
        is_abandoned: Tells whether whoever asked has lost interest; such a job is not begun.
        arrival: When it came, on the monotonic clock.
        started_at: When a worker was last given it, alike.
        ended_at: When that worker was done with it, alike.
        rank: Its place in the queue, see `bngrad_server.scheduling.fair_queue`.
        state: Where it is.
        attempts: How many workers have begun it so far.
        error: Why it could not be computed.
        worker: The worker that the thread of this job leads, or was handed a seat of.
        on_end: Is called, by whichever thread sees the job end, where none sleeps until then.
        is_left: Whether whoever asked has left it to the worker that has got it.
    """

    __slots__ = (
        *("spec", "task", "nbytes", "kernel_key", "client", "priority", "deadline", "is_abandoned"),
        *("arrival", "started_at", "ended_at"),
        *("rank", "state", "attempts", "error", "worker", "on_end", "is_left", "_sleep"),
    )

    def __init__(
        self,
        spec: Spec,
        task: Task,
        nbytes: int,
        kernel_key: KernelKey,
        *,
        client: str,
        priority: int,
        deadline: float | None,
        is_abandoned: Callable[[], bool],
    ) -> None:
        self.spec = spec
        self.task = task
        self.nbytes = nbytes
        self.kernel_key = kernel_key
        self.client = client
        self.priority = priority
        self.deadline = deadline
        self.is_abandoned = is_abandoned
        self.arrival = self.started_at = self.ended_at = time.monotonic()
        self.rank = 0
        self.state = JobState.WAITING
        self.attempts = 0
        self.error: Exception | None = None
        self.worker: Worker | None = None
        self.on_end: Callable[[], None] | None = None
        self.is_left = False
        self._sleep = threading.Lock()  # the cheapest event there is: taken while there is nothing to wake up for
        self._sleep.acquire()

    @property
    def has_ended(self) -> bool:
        """Whether it was computed, or never will be."""
        return self.state is JobState.ENDED

    def reason_to_give_up(self) -> Exception | None:
        """Why nobody wants it any longer: a TimeoutError or a CancelledError; None if somebody does."""
        if self.deadline is not None and time.monotonic() >= self.deadline:
            return TimeoutError("the request was not computed in time")
        if self.is_abandoned():
            return CancelledError()
        return None

    def check(self) -> None:
        """Raises why it could not be computed, if it could not; only once.

        An error that the job kept would keep, by its traceback, all who wait for the job, until garbage is collected.
        """
        try:
            if self.error is not None:
                raise self.error
        finally:
            self.error = None

    def wake(self) -> None:
        """Ends the thread's `sleep`, or its next one."""
        if self._sleep.locked():
            self._sleep.release()

    def sleep(self, timeout_s: float) -> None:
        """Waits for `wake`."""
        self._sleep.acquire(timeout=max(timeout_s, 0))
