"""A server with one TCP port serves everything there, with TLS and tokens."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tests.integration.problems import Case, assert_same_bits, random_inputs
from tests.security.conftest import Guarded
from tests.servers import TIMEOUT_S, Transport, ports_of

from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_protos.v1 import batch_norm_grad_pb2_grpc as pb_grpc

CHECK = health_pb2.HealthCheckRequest()
LIST = reflection_pb2.ServerReflectionRequest(list_services="")
CASES = [Case("v2", "NHWC", shape) for shape in [(2, 9, 9, 7), (16, 65, 65, 9)]]


@pytest.fixture(scope="module")
def one_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    options = ("--open-health",)
    with Guarded(tmp_path_factory.mktemp("one-port"), options=options).running() as guarded:
        yield guarded


@pytest.fixture(scope="module")
def channel(one_port: Guarded) -> Iterator[grpc.Channel]:
    with one_port.channel("TCP") as channel:
        yield channel


@pytest.fixture
def alice(one_port: Guarded) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {one_port.token}"),)


def health_of(channel: grpc.Channel) -> Any:
    return health_pb2_grpc.HealthStub(channel)  # its types have no methods


def reflection_of(channel: grpc.Channel) -> Any:
    return reflection_pb2_grpc.ServerReflectionStub(channel)


def test_it_is_the_only_port_and_the_one_for_large_tensors(one_port: Guarded) -> None:
    port = int(one_port.server.target.rpartition(":")[2])
    assert ports_of(one_port.server.process.pid) == {port}
    assert one_port.endpoints.stream_port == port


@pytest.mark.parametrize("transport", ["auto", "unary", "stream", "shared"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.shape))
def test_every_transport_gives_the_bits_of_grpcio(one_port: Guarded, transport: Transport, case: Case) -> None:
    inputs = random_inputs(case.spec())
    with one_port.client(transport=transport) as client, one_port.client(one_port.unix_target) as other:
        assert_same_bits(case.run(client, inputs), case.run(other, inputs))


def test_health_needs_no_token_if_it_is_open(channel: grpc.Channel) -> None:
    health = health_of(channel)
    assert health.Check(CHECK, timeout=TIMEOUT_S).status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError, match="there is no service 'another'"):
        health.Check(health_pb2.HealthCheckRequest(service="another"), timeout=TIMEOUT_S)
    assert next(health.Watch(CHECK, timeout=TIMEOUT_S)).status == health_pb2.HealthCheckResponse.SERVING


def test_all_else_needs_a_token(channel: grpc.Channel, alice: tuple[tuple[str, str], ...]) -> None:
    stub = pb_grpc.BatchNormGradServiceStub(channel)
    with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
        stub.ServerInfo(pb.ServerInfoRequest(), timeout=TIMEOUT_S)
    assert stub.ServerInfo(pb.ServerInfoRequest(), metadata=alice, timeout=TIMEOUT_S).ops
    with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
        next(reflection_of(channel).ServerReflectionInfo(iter([LIST]), timeout=TIMEOUT_S))


def test_a_reflection_that_stays_open_does_not_hold_up_other_calls(
    channel: grpc.Channel, alice: tuple[tuple[str, str], ...]
) -> None:
    requests: queue.SimpleQueue[reflection_pb2.ServerReflectionRequest | None] = queue.SimpleQueue()
    stub = reflection_of(channel)
    answers = stub.ServerReflectionInfo(iter(requests.get, None), metadata=alice, timeout=TIMEOUT_S)
    for _ in range(2):
        requests.put(LIST)
        names = [service.name for service in next(answers).list_services_response.service]
        assert "bngrad.v1.BatchNormGradService" in names
    health_of(channel).Check(CHECK, timeout=TIMEOUT_S)
    assert list(answers) == []
    requests.put(None)


def test_messages_that_cannot_be_read_are_refused(channel: grpc.Channel) -> None:
    check: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/grpc.health.v1.Health/Check")
    for message, code in ((b"\xff", "INVALID_ARGUMENT"), (bytes(2**17), "RESOURCE_EXHAUSTED")):
        with pytest.raises(grpc.RpcError, match=code):
            check(message, timeout=TIMEOUT_S)
