"""A job, which is a staged request on its way through the queue, and what the workers that compute jobs must offer."""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from typing import Any, Protocol, TypeAlias

import numpy as np

from bngrad_kernels.spec import Spec
from bngrad_server.memory.layout import Task

WORK_OF_ANY_REQUEST = 1 << 18
"""What a request costs in addition to its bytes, in bytes."""

KernelKey: TypeAlias = tuple[np.dtype[Any], bool, bool, int]
"""What jobs of one launch have in common: dtype, whether channels come last, mode, order."""


class JobState(enum.Enum):
    """Where a job is."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


class Job:
    """A staged request. The batcher changes it, under its mutex.

    Attributes:
        spec: What to compute.
        task: Where its tensors lie.
        nbytes: The size of its tensors.
        kernel_key: Jobs of one key can share a launch.
        client: The client that sent the request; clients share the workers evenly.
        priority: How much earlier it is computed than others.
        deadline: When the request times out, on the monotonic clock; None means never.
        is_abandoned: Tells whether the client has cancelled the request; such a job is not begun.
        arrival: When it came, on the monotonic clock.
        started_at: When a worker was last given it, on the monotonic clock.
        ended_at: When that worker was done with it, on the monotonic clock.
        rank: Its place in the queue, see `bngrad_server.scheduling.fair_queue`.
        state: Where it is.
        attempts: How many workers have begun it so far.
        error: Why it could not be computed.
        worker: The worker of which the thread of this job holds a slot.
        on_end: Called, by the thread that sees the job end, where no thread sleeps until then.
        is_left: Whether its request has ended while a worker computes it.
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
        on_end: Callable[[], None] | None = None,
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
        self.on_end = on_end
        self.is_left = False
        self._sleep = threading.Lock()  # the cheapest event there is: held while there is nothing to wake up for
        self._sleep.acquire()

    @property
    def has_ended(self) -> bool:
        """Whether it was computed, or never will be."""
        return self.state is JobState.ENDED

    def reason_to_give_up(self) -> Exception | None:
        """Returns a TimeoutError or a CancelledError once its request waits no longer; otherwise None."""
        if self.deadline is not None and time.monotonic() >= self.deadline:
            return TimeoutError("the request was not computed in time")
        if self.is_abandoned():
            return CancelledError()
        return None

    def check(self) -> None:
        """Raises why it could not be computed, if it could not; only once.

        Then it forgets the error, whose traceback would keep all callers' frames until garbage is collected.
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


Part: TypeAlias = tuple[Job, range]
"""A job, and which of its channels to compute."""


class Run(Protocol):
    """A batch, or a part of one, that a worker computes; for one thread at a time."""

    def fileno(self) -> int:
        """The file descriptor that is readable once `finish` need not wait."""

    def finish(self) -> list[str | None] | None:
        """Waits until all is computed; returns for each part why it failed, or just None if none did.

        Raises:
            WorkerDiedError: The process ended.
        """


class Worker(Protocol):
    """Computes batches."""

    @property
    def slots(self) -> int:
        """How many batches it computes at once."""

    def begin(self, parts: Sequence[Part]) -> Run:
        """Begins to compute parts of jobs of one kernel key; only called while a slot is free.

        Raises:
            WorkerDiedError: The process ended.
        """

    def has_copy(self, number: int) -> bool:
        """Whether its GPU may have a copy of a tensor that was sent ahead, see `Place.ahead`."""

    def kill(self) -> None:
        """Kills the process at once."""
