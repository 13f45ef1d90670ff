"""The actor that owns the replicas, knows their targets and decides how many there are."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from bngrad.ray._autoscaling import Autoscaler, AutoscalingPolicy
from bngrad.ray._replica import Replica, State, actor_options

logger = logging.getLogger("bngrad")

_PERIOD_S = 0.5
_STOP_TIMEOUT_S = 45.0


class _Tracked:
    """A replica, the question that it has not answered yet, and its last answer."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.question: Any = None
        self.state: State | None = None
        self.has_answered = False


class Controller:
    """Owns the replicas. When its process dies, they do; Ray then starts it again, and it starts them again."""

    def __init__(
        self, replicas: int, resources: Mapping[str, float], options: Sequence[str], client_options: Mapping[str, Any]
    ) -> None:
        """Starts the replicas without waiting for them."""
        self._replica = ray.remote(Replica).options(max_restarts=-1, max_concurrency=4, **actor_options(resources))
        self._arguments = options, client_options
        self._mutex = threading.Lock()
        self._replicas: list[_Tracked] = []
        self._autoscaler: Autoscaler | None = None
        self._stopping = threading.Event()
        with self._mutex:
            self._resize(replicas)
        threading.Thread(target=self._run, name="bngrad-controller", daemon=True).start()

    def wait(self, timeout_s: float) -> None:
        """Waits until every replica is ready.

        Raises:
            RuntimeError: A server ended before it was ready, or one is not ready in time.
        """
        deadline = time.monotonic() + timeout_s
        with self._mutex:
            waits = [replica.actor.wait.remote(timeout_s) for replica in self._replicas]
        ready, late = ray.wait(waits, num_returns=len(waits), timeout=timeout_s)
        ray.get(ready)
        while not late and len(self.targets()) < len(waits) and time.monotonic() < deadline:
            self._stopping.wait(_PERIOD_S / 10)
        missing = len(waits) - len(self.targets())
        if missing:
            raise RuntimeError(
                f"{missing} of {len(waits)} replicas are not ready, or have found no node, after {timeout_s:g} s"
            )

    def targets(self) -> list[str]:
        """Returns where the servers of the replicas that answer listen."""
        return [state.target for state in self.states() if state.target]

    def states(self) -> list[State]:
        """Returns what the replicas that answer are doing."""
        with self._mutex:
            return [replica.state for replica in self._replicas if replica.state is not None]

    def scale(self, replicas: int) -> None:
        """Starts or stops replicas, without waiting for them, and ends autoscaling."""
        with self._mutex:
            self._autoscaler = None
            self._resize(replicas)

    def autoscale(self, policy: AutoscalingPolicy) -> None:
        """Starts and stops replicas from now on as requests come and go."""
        self._autoscaler = Autoscaler(policy)

    def stop(self) -> None:
        """Has every server finish its requests, and waits until all have ended."""
        self._stopping.set()
        with self._mutex:
            replicas, self._replicas = self._replicas, []
        _stop(replicas)

    def _run(self) -> None:
        while not self._stopping.wait(_PERIOD_S):
            try:
                self._ask()
                self._follow_requests()
            except Exception:
                logger.exception("the replicas could not be asked; the next attempt follows")

    def _ask(self) -> None:
        with self._mutex:
            replicas = list(self._replicas)
        for replica in replicas:
            # A replica that waits for a node, or whose node has gone, keeps its question until it answers or fails.
            replica.question = replica.question or replica.actor.state.remote()
        deadline = time.monotonic() + 2 * _PERIOD_S
        for replica in replicas:
            done, _ = ray.wait([replica.question], timeout=max(deadline - time.monotonic(), 0))
            state = None
            if done:
                question, replica.question = replica.question, None
                try:
                    state = ray.get(question)
                    replica.has_answered = True
                except ray.exceptions.RayError:
                    logger.warning("a replica does not answer; Ray starts it again")
            replica.state = state

    def _follow_requests(self) -> None:
        with self._mutex:
            if self._autoscaler is not None:
                states = [replica.state for replica in self._replicas if replica.state is not None]
                requests = sum(state.requests or 0 for state in states)
                self._resize(self._autoscaler.replicas(len(self._replicas), requests))

    def _resize(self, replicas: int) -> None:
        """Starts or stops replicas; the caller holds the mutex, so that no other decision comes between."""
        surplus = self._replicas[replicas:]
        del self._replicas[replicas:]
        while len(self._replicas) < replicas and not self._stopping.is_set():
            self._replicas.append(_Tracked(self._replica.remote(*self._arguments)))
        if surplus:
            threading.Thread(target=_stop, args=(surplus,), name="bngrad-stop", daemon=True).start()


def _stop(replicas: Sequence[_Tracked]) -> None:
    """Drains servers, then ends their actors. A replica that never answered has no clients; it may wait for a node."""
    stops = [replica.actor.stop.remote() for replica in replicas if replica.has_answered]
    if stops:
        ray.wait(stops, num_returns=len(stops), timeout=_STOP_TIMEOUT_S)
    for replica in replicas:
        ray.kill(replica.actor)
