"""Servers on a real Ray cluster of three nodes on this machine, whose processes are killed under load.

Ray is no dependency of the tests, since its cluster takes longer to start than CI has for it: pip install ray.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.integration.load import Load
from tests.integration.problems import random_inputs
from tests.servers import is_running, wait_until

import bngrad
from bngrad_kernels.spec import FLOAT32, Spec

ray = pytest.importorskip("ray", reason="Ray is not installed: make test-ray", exc_type=ImportError)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SPEC = Spec(FLOAT32, (4, 16, 16, 32), 3)
INPUTS = [random_inputs(SPEC, 1)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head for the controller, and three nodes for one replica of two CPUs each."""
    from ray.cluster_utils import Cluster  # noqa: PLC0415 - after the check that there is one

    with pytest.MonkeyPatch.context() as environment:
        for name, value in {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}.items():
            environment.setenv(name, value)
        health_checks = {"health_check_period_ms": 1000, "health_check_failure_threshold": 3}
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": health_checks})
        try:
            for _ in range(3):
                cluster.add_node(num_cpus=2)
            ray.init(address=cluster.address, log_to_driver=False)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


@pytest.fixture
def fleet(cluster: Any) -> Iterator[Any]:
    import bngrad.ray  # noqa: PLC0415

    with bngrad.ray.start(2, {"CPU": 2}, options=("--insecure", "--workers", "1")) as fleet:
        yield fleet


def answers(state: Any, target: str) -> bool:
    return bool(state.target == target and state.requests is not None)


def batches(client: bngrad.Client) -> int:
    """How many a server has computed; gRPC may refuse the first call at once, as it remembers the failed connection."""
    try:
        return sum(client.server_info().batch_sizes)
    except bngrad.UnavailableError:
        return 0


def test_a_killed_server_is_started_again_and_no_call_is_lost(fleet: Any) -> None:
    with fleet.client() as client, Load(client, INPUTS, callers=4) as load:
        load.wait(20)
        victim = fleet.states()[0]
        os.kill(victim.pid, signal.SIGKILL)
        load.wait(20)
        wait_until(lambda: any(answers(each, victim.target) and each.pid != victim.pid for each in fleet.states()))
        with bngrad.Client(victim.target) as direct:
            wait_until(lambda: batches(direct) > 20)
        load.wait(20)


def test_a_killed_node_is_replaced_and_no_call_is_lost(cluster: Any, fleet: Any) -> None:
    with fleet.client() as client, Load(client, INPUTS, callers=4) as load:
        load.wait(20)
        victim = fleet.states()[0]
        node = next(each for each in cluster.worker_nodes if each.node_id == victim.node_id)
        raylet = node.all_processes["raylet"][0].process
        raylet.kill()
        raylet.wait()  # its workers take a zombie for a living parent
        load.wait(20)
        wait_until(lambda: not is_running(victim.pid))

        def is_replaced() -> bool:
            answering = [each.node_id for each in fleet.states() if each.requests is not None]
            return len(answering) == 2 and victim.node_id not in answering

        wait_until(is_replaced, timeout_s=120)
        load.wait(20)


def test_a_task_has_a_client_of_its_own(fleet: Any) -> None:
    def call(fleet: Any) -> str:
        with fleet.client() as client:
            client.fused_batch_norm_grad_v2(*INPUTS[0])
            return str(client.server_info().version)

    assert ray.get(ray.remote(num_cpus=0)(call).remote(fleet)) == bngrad.__version__


def test_replicas_come_with_requests_and_go_without_losing_any(cluster: Any) -> None:
    import bngrad.ray  # noqa: PLC0415

    with (
        bngrad.ray.start(1, {"CPU": 1}, options=("--insecure", "--workers", "1")) as fleet,
        fleet.client() as client,
    ):
        fleet.autoscale(1, 2, target_ongoing_requests=2, upscale_delay_s=0.5, downscale_delay_s=2)
        with Load(client, INPUTS, callers=16):
            wait_until(lambda: len(fleet.targets()) == 2)
        with Load(client, INPUTS, callers=1) as load:
            wait_until(lambda: len(fleet.targets()) == 1)
            load.wait(5)


def test_a_start_that_finds_no_node_ends_in_time(cluster: Any) -> None:
    import bngrad.ray  # noqa: PLC0415

    start = time.monotonic()
    with pytest.raises(RuntimeError, match="1 of 1 replicas are not ready, or have found no node, after 2 s"):
        bngrad.ray.start(1, {"no-such-resource": 1}, timeout=2)
    assert time.monotonic() - start < 30


def test_a_wrong_option_ends_the_start(cluster: Any) -> None:
    import bngrad.ray  # noqa: PLC0415

    with pytest.raises(RuntimeError, match="bngrad serve ended with exit code 2"):
        bngrad.ray.start(options=("--no-such-option",))


@pytest.mark.parametrize(("replicas", "resources"), [(0, None), (1, {"CPU": -1})])
def test_wrong_arguments_are_refused(cluster: Any, replicas: int, resources: dict[str, float] | None) -> None:
    import bngrad.ray  # noqa: PLC0415

    with pytest.raises(ValueError, match="should"):
        bngrad.ray.start(replicas, resources)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"replicas": 1.5}, "replicas must be an int, not 1.5"),
        ({"resources": {"CPU": "2"}}, r"resources\['CPU'\] must be a number, not '2'"),
        ({"options": "--insecure"}, "options must be a sequence of str, not '--insecure'"),
        ({"timeout": "1 s"}, "timeout must be a number of seconds, not '1 s'"),
    ],
)
def test_arguments_of_another_type_are_refused_before_an_actor_starts(
    cluster: Any, arguments: dict[str, Any], message: str
) -> None:
    import bngrad.ray  # noqa: PLC0415

    with pytest.raises(TypeError, match=message):
        bngrad.ray.start(**arguments)


@pytest.mark.parametrize(
    ("limits", "delays", "error"),
    [
        ((1, 2.5), {}, TypeError),
        ((1, 2), {"downscale_delay_s": "1 s"}, TypeError),
        ((1, 2), {"upscale_delay_s": -1}, ValueError),
        ((1, 2), {"target_ongoing_requests": math.nan}, ValueError),
    ],
)
def test_a_policy_that_cannot_be_followed_is_refused(
    cluster: Any, limits: tuple[Any, Any], delays: dict[str, Any], error: type[Exception]
) -> None:
    import bngrad.ray  # noqa: PLC0415

    with pytest.raises(error, match=r"max_replicas|downscale_delay_s|upscale_delay_s|target_ongoing_requests"):
        bngrad.ray.Fleet(None, {}).autoscale(*limits, **delays)


def test_a_fleet_starts_no_cluster_of_its_own_after_ray_was_shut_down(cluster: Any) -> None:
    import bngrad.ray  # noqa: PLC0415

    try:
        with (
            bngrad.ray.start(1, {"CPU": 1}, options=("--insecure", "--workers", "1")) as fleet,
            fleet.client(timeout=3) as client,
        ):
            client.fused_batch_norm_grad_v2(*INPUTS[0])
            ray.shutdown()
            with pytest.raises(RuntimeError, match=r"not connected to Ray, as after ray.shutdown\(\)"):
                fleet.targets()
            wait_until(lambda: batches(client) == 0)  # the server has ended
            with pytest.raises(bngrad.UnavailableError):
                client.fused_batch_norm_grad_v2(*INPUTS[0])
        assert not ray.is_initialized()
    finally:
        ray.shutdown()
        ray.init(address=cluster.address, log_to_driver=False)
