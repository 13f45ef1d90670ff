"""The configuration for Envoy, run by a real Envoy in front of real servers, with TLS on both sides."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.integration.problems import Case, assert_same_bits, random_inputs
from tests.raw_http2 import request
from tests.security.authority import Authority
from tests.servers import ONE_WORKER, TIMEOUT_S, Transport, free_port, ports_of, wait_until

import bngrad
from bngrad_cli.embedded import EmbeddedServer
from bngrad_protos.v1 import batch_norm_grad_pb2_grpc as pb_grpc
from bngrad_wire.token_format import new_token

CONFIGURATION = Path(__file__).parents[2] / "docker" / "envoy" / "envoy.yaml"
ENVOY = Path(sys.executable).parent / "envoy"
HOSTS = ("127.0.0.2", "127.0.0.3")
# Below and above the MiB that Envoy holds, and above a message of 4 MiB.
CASES = [Case("v2", "NHWC", shape) for shape in [(2, 9, 9, 7), (16, 65, 65, 9), (64, 65, 65, 9)]]


class Fleet:
    """Two servers, and Envoy in front of them.

    Attributes:
        target: Envoy's address.
        servers: The servers by their addresses; a test may replace one.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.authority = Authority(directory)
        self.target = f"localhost:{free_port()}"
        self.port, self.admin = free_port(*HOSTS), free_port()
        self.token, line = new_token("alice")
        (directory / "tokens").write_text(f"{line}\n")
        pair, self.own = self.authority.issue("bngrad"), self.authority.issue("localhost")
        self.options = {
            host: (
                *(*ONE_WORKER, "--shared-bytes", "0", "--advertise-stream", "none", "--open-health"),
                *("--tls-certificate", str(pair.certificate), "--tls-key", str(pair.key)),
                *("--token-file", str(directory / "tokens")),
            )
            for host in HOSTS
        }
        self.servers: dict[str, EmbeddedServer] = {}

    @contextmanager
    def running(self) -> Iterator[Fleet]:
        with ExitStack() as stack, (self.directory / "envoy.log").open("wb") as log:
            with ThreadPoolExecutor() as starters:
                list(starters.map(self.start, HOSTS))
            stack.callback(self.stop)
            process = subprocess.Popen([*self.command("serve"), "--concurrency", "1"], stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.kill)
            wait_until(lambda: len(self.healthy()) == len(HOSTS))
            yield self

    def start(self, host: str) -> None:
        server = EmbeddedServer(f"{host}:{self.port}", options=self.options[host])
        self.servers[host] = server.__enter__()

    def stop(self) -> None:
        for server in self.servers.values():
            server.__exit__()

    def command(self, mode: str) -> list[str]:
        """Returns the command that runs Envoy with the configuration, for the addresses and files of this test."""
        path = self.directory / "envoy.yaml"
        path.write_text(yaml.safe_dump(self.configuration()))
        return [str(ENVOY), "--mode", mode, "--config-path", str(path), "--disable-hot-restart"]

    def configuration(self) -> dict[str, Any]:
        text = CONFIGURATION.read_text()
        for name, file in (
            ("envoy.pem", self.own.certificate),
            ("envoy.key", self.own.key),
            ("ca.pem", self.authority.path),
        ):
            text = text.replace(f"/etc/envoy/{name}", str(file))
        configuration: dict[str, Any] = yaml.safe_load(text)
        static = configuration["static_resources"]
        _place(configuration["admin"], "127.0.0.1", self.admin)
        _place(static["listeners"][0], "127.0.0.1", int(self.target.rpartition(":")[2]))
        (locality,) = static["clusters"][0]["load_assignment"]["endpoints"]
        (endpoint,) = locality["lb_endpoints"]
        locality["lb_endpoints"] = [json.loads(json.dumps(endpoint)) for _ in HOSTS]
        for host, each in zip(HOSTS, locality["lb_endpoints"], strict=True):
            _place(each["endpoint"], host, self.port)
        return configuration

    def statistics(self) -> dict[str, dict[str, Any]]:
        """Returns what Envoy knows of each server."""
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.admin}/clusters?format=json", timeout=TIMEOUT_S
            ) as page:
                (cluster,) = json.load(page)["cluster_statuses"]
        except OSError:  # not listening yet
            return {}
        return {each["address"]["socket_address"]["address"]: each for each in cluster["host_statuses"]}

    def healthy(self) -> list[str]:
        """Returns the addresses of the servers to which Envoy would send calls."""
        healthy = {"eds_health_status": "HEALTHY"}
        return [host for host, each in self.statistics().items() if each["health_status"] == healthy]

    def answers(self) -> dict[str, int]:
        """Returns how many calls each server has answered."""
        return {
            host: sum(int(stat.get("value", 0)) for stat in each["stats"] if stat["name"] == "rq_success")
            for host, each in self.statistics().items()
        }

    def client(self, target: str | list[str] | None = None, **arguments: Any) -> bngrad.Client:
        name = None if target is None else "bngrad"
        tls = bngrad.Tls(self.authority.path, server_name=name)
        return bngrad.Client(target or self.target, tls=tls, token=self.token, **arguments)


def _place(owner: dict[str, Any], host: str, port: int) -> None:
    owner["address"]["socket_address"] = {"address": host, "port_value": port}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("envoy")).running() as fleet:
        yield fleet


@pytest.mark.parametrize("transport", ["auto", "unary", "stream"])
def test_every_transport_between_hosts_gives_a_servers_bits_through_envoy(fleet: Fleet, transport: Transport) -> None:
    before = fleet.answers()
    direct = [f"{host}:{fleet.port}" for host in HOSTS]
    with fleet.client(transport=transport) as client, fleet.client(direct) as other:
        for case in CASES:
            inputs = random_inputs(case.spec())
            expected = case.run(other, inputs)
            with ThreadPoolExecutor(4) as callers:
                for answer in callers.map(lambda _: case.run(client, inputs), range(4)):  # noqa: B023
                    assert_same_bits(answer, expected)
        assert client.server_info().stream_port == 0
    assert all(fleet.answers()[host] > before[host] for host in HOSTS)


def test_servers_that_advertise_no_port_open_none(fleet: Fleet) -> None:
    assert [ports_of(server.process.pid) for server in fleet.servers.values()] == [{fleet.port}] * len(HOSTS)


def test_no_memory_is_shared_around_envoy(fleet: Fleet) -> None:
    with fleet.client(transport="shared") as client, pytest.raises(bngrad.NotSharedError):
        CASES[0].run(client, random_inputs(CASES[0].spec()))


def test_a_stock_client_and_errors_pass_through_envoy(fleet: Fleet) -> None:
    credentials = grpc.ssl_channel_credentials(fleet.authority.path.read_bytes())
    with grpc.secure_channel(fleet.target, credentials) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)  # its types have no methods
        answer = health.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    y_backprop, x, scale, mean, variance = random_inputs(CASES[0].spec())
    with fleet.client() as client, pytest.raises(bngrad.InvalidArgumentError) as refused:
        client.fused_batch_norm_grad_v2(y_backprop, x, scale[1:], mean, variance)
    assert refused.value.violations[0].field == "scale"


def test_a_burst_of_calls_reaches_servers_that_take_one_call_at_a_time(fleet: Fleet) -> None:
    """Envoy must open a connection for each call, also before it has read what the server says of that."""
    tls = grpc.ssl_channel_credentials(fleet.authority.path.read_bytes())
    token = grpc.access_token_call_credentials(fleet.token)
    with grpc.secure_channel(fleet.target, grpc.composite_channel_credentials(tls, token)) as channel:
        stub = pb_grpc.BatchNormGradServiceStub(channel)
        calls = [stub.FusedBatchNormGradV2.future(request(4096), timeout=TIMEOUT_S) for _ in range(40)]
        assert [call.exception() for call in calls] == [None] * len(calls)


def test_a_killed_server_loses_no_call(fleet: Fleet) -> None:
    host, case, ended, counts = HOSTS[0], CASES[1], threading.Event(), [0] * 4
    inputs = random_inputs(case.spec())

    def keep_calling(caller: int) -> None:
        transport: Transport = "stream" if caller % 2 else "unary"
        with fleet.client(transport=transport) as client:
            expected = case.run(client, inputs)
            while not ended.is_set():
                assert_same_bits(case.run(client, inputs, timeout=TIMEOUT_S), expected)
                counts[caller] += 1

    def wait_for_calls() -> None:
        before = list(counts)
        wait_until(lambda: any(each.done() for each in callers) or all(map(int.__gt__, counts, before)))

    with ThreadPoolExecutor(len(counts)) as threads:
        callers = [threads.submit(keep_calling, caller) for caller in range(len(counts))]
        try:
            wait_for_calls()
            fleet.servers[host].process.kill()
            wait_for_calls()
            fleet.servers[host].__exit__()
            fleet.start(host)
            wait_until(lambda: len(fleet.healthy()) == len(HOSTS))
            before = fleet.answers()[host]
            wait_until(lambda: any(each.done() for each in callers) or fleet.answers()[host] > before)
        finally:
            ended.set()
        for each in callers:
            each.result()


def test_all_calls_that_a_killed_server_had_are_repeated(fleet: Fleet) -> None:
    host = HOSTS[0]
    tls = grpc.ssl_channel_credentials(fleet.authority.path.read_bytes())
    token = grpc.access_token_call_credentials(fleet.token)
    with grpc.secure_channel(fleet.target, grpc.composite_channel_credentials(tls, token)) as channel:
        stub = pb_grpc.BatchNormGradServiceStub(channel)
        os.kill(fleet.servers[host].process.pid, signal.SIGSTOP)
        calls = [stub.FusedBatchNormGradV2.future(request(4096), timeout=TIMEOUT_S) for _ in range(40)]
        wait_until(lambda: any(call.done() for call in calls))  # so the others are there, too
        fleet.servers[host].process.kill()
        assert [call.exception() for call in calls] == [None] * len(calls)
    fleet.servers[host].__exit__()
    fleet.start(host)
    wait_until(lambda: len(fleet.healthy()) == len(HOSTS))


def test_envoy_accepts_the_configuration_without_tls(fleet: Fleet) -> None:
    configuration = fleet.configuration()
    static = configuration["static_resources"]
    del static["listeners"][0]["filter_chains"][0]["transport_socket"], static["clusters"][0]["transport_socket"]
    command = [str(ENVOY), "--mode", "validate", "--config-yaml", json.dumps(configuration)]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
