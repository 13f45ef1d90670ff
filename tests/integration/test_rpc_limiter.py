"""Health is answered while thousands of calls other than ops are left open."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.raw_http2 import PREFACE, RawConnection, data, headers, path_of, prefixed, request
from tests.servers import ONE_WORKER, TIMEOUT_S, hold_new_workers, wait_until, worker_pid

from bngrad_cli.embedded import EmbeddedServer
from bngrad_server.config import MAX_CALLS
from bngrad_wire.http2 import frames

HEALTH = "/grpc.health.v1.Health/"
WATCH = f"{HEALTH}Watch"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
OP = request(256).SerializeToString()
CONNECTIONS = 32
"""Connections with MAX_CALLS calls each: more of any kind than may wait."""
PATIENT_SUPERVISOR = ("--transfer-timeout", "600")
"""Longer than any test, so that no stalled call is ended."""
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
READS_NOTHING = frames.PREFACE + frames.settings({frames.INITIAL_WINDOW_SIZE: 0})


@contextmanager
def stopped_well(*options: str) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(options=(*ONE_WORKER, *PATIENT_SUPERVISOR, *options)) as server:
        yield server
        assert server.stop() == 0


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    with stopped_well() as server:
        yield server


@contextmanager
def flood(
    server: EmbeddedServer, path: str, begun: bytes, hello: bytes = PREFACE, connections: int = CONNECTIONS
) -> Iterator[None]:
    """Calls that all send the same first bytes and then stall."""
    calls = [headers(path, stream) + (data(begun, stream) if begun else b"") for stream in range(1, 2 * MAX_CALLS, 2)]
    with ExitStack() as stack:
        peers = [stack.enter_context(RawConnection(server.target)) for _ in range(connections)]
        for peer in peers:
            assert peer.send(hello + b"".join(calls))
        yield


def status_of(channel: grpc.Channel) -> int:
    check = health_pb2_grpc.HealthStub(channel).Check  # type: ignore[attr-defined]
    answer: health_pb2.HealthCheckResponse = check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
    return int(answer.status)


@pytest.mark.parametrize("hello", [PREFACE, READS_NOTHING], ids=["", "reads nothing"])
@pytest.mark.parametrize("begun", [b"", prefixed(b"")], ids=["no message", "message"])
@pytest.mark.parametrize(
    "path", [f"{HEALTH}Check", WATCH, REFLECTION, "/grpc.channelz.v1.Channelz/GetServers", path_of("ServerInfo")]
)
def test_health_is_answered_while_many_other_calls_stall(
    server: EmbeddedServer, path: str, begun: bytes, hello: bytes
) -> None:
    with grpc.insecure_channel(server.target) as channel, flood(server, path, begun, hello):
        assert status_of(channel) == SERVING


def test_health_is_answered_by_a_server_that_traces_while_many_other_calls_stall() -> None:
    with (
        stopped_well("--traces") as server,
        grpc.insecure_channel(server.target) as channel,
        flood(server, WATCH, prefixed(b""), READS_NOTHING),
    ):
        assert status_of(channel) == SERVING


@pytest.mark.parametrize("method", ["FusedBatchNormGradV2", "Exchange"])
def test_health_is_answered_during_a_flood_of_ops_and_ops_after_it(server: EmbeddedServer, method: str) -> None:
    with grpc.insecure_channel(server.target) as channel:
        with flood(server, path_of(method), b""):
            assert status_of(channel) == SERVING
        op: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(path_of("FusedBatchNormGradV2"))
        wait_until(lambda: op.future(OP, timeout=TIMEOUT_S).exception() is None)


def test_a_watcher_of_health_gets_each_change_while_others_read_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = hold_new_workers(tmp_path, monkeypatch)
    with EmbeddedServer(options=ONE_WORKER) as server, grpc.insecure_channel(server.target) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch  # type: ignore[attr-defined]
        with flood(server, WATCH, prefixed(b""), READS_NOTHING, connections=4):
            told = watch(health_pb2.HealthCheckRequest(), timeout=3 * TIMEOUT_S)
            assert next(told).status == SERVING
            unknown = watch(health_pb2.HealthCheckRequest(service="nobody"), timeout=3 * TIMEOUT_S)
            assert next(unknown).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            gate.touch()
            os.kill(worker_pid(server), signal.SIGKILL)
            assert next(told).status == NOT_SERVING
            gate.unlink()
            assert next(told).status == SERVING
        server.process.terminate()
        assert [answer.status for answer in told] == [NOT_SERVING]
        assert server.process.wait(TIMEOUT_S / 3) == 0
