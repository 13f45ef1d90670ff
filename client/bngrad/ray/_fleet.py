"""What a program has of its servers on a Ray cluster."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from bngrad._client import Client
from bngrad._validation import check_timeout
from bngrad.ray._autoscaling import AutoscalingPolicy
from bngrad.ray._controller import Controller
from bngrad.ray._replica import State, serve_options

_ANSWER_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 60.0


class Fleet:
    """Servers on a Ray cluster, see `start`. It may be passed to Ray's tasks and actors.

    They end with `stop`, at the end of a ``with`` block, or with the program that started them.
    """

    def __init__(self, controller: Any, client_options: Mapping[str, Any]) -> None:
        """Use `start` instead."""
        self._controller = controller
        self._client_options = dict(client_options)

    def client(self, **options: Any) -> Client:
        """Makes a client whose servers are those of the fleet at any time.

        Args:
            options: Arguments of `bngrad.Client` beside the target, instead of those given to `start`.
        """
        return Client(self.targets, **{**self._client_options, **options})

    def targets(self) -> list[str]:
        """Returns the addresses of the servers; `client` asks again and again."""
        found: list[str] = ray.get(self._connected().targets.remote(), timeout=_ANSWER_TIMEOUT_S)
        return found

    def states(self) -> list[State]:
        """Returns what the replicas that answer are doing."""
        found: list[State] = ray.get(self._connected().states.remote(), timeout=_ANSWER_TIMEOUT_S)
        return found

    def scale(self, replicas: int) -> None:
        """Starts or stops replicas, without waiting for them, and ends autoscaling.

        A server that is stopped finishes its requests; clients go to the others.

        Raises:
            ValueError: There would be none.
        """
        _check(replicas)
        ray.get(self._connected().scale.remote(replicas))

    def autoscale(
        self,
        min_replicas: int,
        max_replicas: int,
        *,
        target_ongoing_requests: float = 8.0,
        upscale_delay_s: float = 3.0,
        downscale_delay_s: float = 60.0,
    ) -> None:
        """Starts and stops replicas from now on as requests come and go.

        A replica that finds no node waits for one, which is what Ray's cluster autoscaler adds nodes for.

        Args:
            min_replicas: The fewest replicas.
            max_replicas: The most replicas.
            target_ongoing_requests: How many requests a replica should have, waiting or being computed.
            upscale_delay_s: How long more replicas must have been needed before they are started, in seconds.
            downscale_delay_s: How long fewer replicas would have done before some are stopped, in seconds.

        Raises:
            TypeError: An argument is no number.
            ValueError: An argument is out of range.
        """
        _check(min_replicas, "min_replicas")
        _check(max_replicas, "max_replicas")
        _check_number(target_ongoing_requests, "target_ongoing_requests")
        _check_number(upscale_delay_s, "upscale_delay_s")
        _check_number(downscale_delay_s, "downscale_delay_s")
        if max_replicas < min_replicas:
            raise ValueError(f"max_replicas is {max_replicas}; it should be at least min_replicas, {min_replicas}")
        if target_ongoing_requests <= 0:
            raise ValueError(f"target_ongoing_requests is {target_ongoing_requests}; it should be greater than 0")
        policy = AutoscalingPolicy(
            min_replicas, max_replicas, target_ongoing_requests, upscale_delay_s, downscale_delay_s
        )
        ray.get(self._connected().autoscale.remote(policy))

    def stop(self) -> None:
        """Has the servers finish their requests, and ends them and their actors, unless ``ray.shutdown`` did so."""
        if not ray.is_initialized():
            return
        ray.wait([self._controller.stop.remote()], timeout=_STOP_TIMEOUT_S)
        ray.kill(self._controller)

    def _connected(self) -> Any:
        """Returns the controller, unless Ray would start another cluster, as it does for a question without one."""
        if not ray.is_initialized():
            raise RuntimeError("this program is not connected to Ray, as after ray.shutdown(): it cannot ask the fleet")
        return self._controller

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


def start(
    replicas: int = 1,
    resources: Mapping[str, float] | None = None,
    *,
    options: Sequence[str] = (),
    client_options: Mapping[str, Any] | None = None,
    timeout: float = 120.0,
) -> Fleet:
    """Starts servers on the nodes of the Ray cluster that this program is connected to, or that Ray starts for it.

    Each replica is an actor that owns a ``bngrad serve`` process on its node, and starts it again when it dies. If the
    actor or its node dies, Ray starts it again, on another node if need be. bngrad must be installed on each node.

    Args:
        replicas: How many.
        resources: What each replica needs, as in a bundle of Ray's placement groups: ``{"CPU": 4}``, ``{"GPU": 1}``,
            ``{"CPU": 1, "accelerator_type:A100": 0.01}``. Without a GPU, a server computes on as many threads as it has
            CPUs. The default is one CPU.
        options: Further options of ``bngrad serve``, such as ``("--token-file", "/etc/bngrad/tokens")``. Unless they
            protect them, anyone who reaches a node may call its server.
        client_options: Arguments of `bngrad.Client` beside the target, for clients of these servers.
        timeout: How long the servers may take to be ready, in seconds.

    Raises:
        TypeError: An argument has another type.
        ValueError: There would be no replica, or an amount or the timeout is negative.
        RuntimeError: A server ended before it was ready, or not all are ready in time.
    """
    _check(replicas)
    resources = {"CPU": 1.0} if resources is None else dict(resources)
    for name, amount in resources.items():
        _check_number(amount, f"resources[{name!r}]")
    if isinstance(options, str):
        raise TypeError(f"options must be a sequence of str, not {options!r}")
    timeout = check_timeout(timeout)
    client_options = dict(client_options or {})
    if not ray.is_initialized():
        ray.init()
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    controller = (
        ray.remote(Controller)
        .options(num_cpus=0, max_restarts=-1, max_concurrency=64, scheduling_strategy=here)
        .remote(replicas, resources, (*serve_options(resources), *options), client_options)
    )
    fleet = Fleet(controller, client_options)
    try:
        ray.get(controller.wait.remote(timeout))
    except ray.exceptions.RayError as error:
        fleet.stop()
        cause = getattr(error, "cause", None) or error
        raise RuntimeError(str(cause).splitlines()[-1]) from error
    return fleet


def _check(replicas: int, name: str = "replicas") -> None:
    if not isinstance(replicas, numbers.Integral):
        raise TypeError(f"{name} must be an int, not {replicas!r}")
    if replicas < 1:
        raise ValueError(f"{name} is {replicas}; it should be at least 1")


def _check_number(value: float, name: str) -> None:
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, not {value!r}")
    if not value >= 0:  # also refuses NaN
        raise ValueError(f"{name} is {value}; it should not be negative")
