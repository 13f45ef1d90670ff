"""Servers report their load over every transport, and clients of several kinds heed it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from tests.integration.problems import random_inputs
from tests.servers import ONE_WORKER, TIMEOUT_S, TRANSPORTS, Transport, wait_until

import bngrad
from bngrad._requests import ops
from bngrad._requests.attributes import TensorFlowAttributes
from bngrad_cli.embedded import EmbeddedServer
from bngrad_kernels.spec import FLOAT32, Spec
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_wire.load_report import TEXT_HEADER

SMALL, LARGE = Spec(FLOAT32, (2, 5, 5, 3), 3), Spec(FLOAT32, (16, 28, 28, 32), 3)


@pytest.fixture(scope="module")
def targets() -> Iterator[list[str]]:
    with EmbeddedServer(options=ONE_WORKER) as first, EmbeddedServer(options=ONE_WORKER) as second:
        yield [first.target, second.target]


@pytest.mark.parametrize("spec", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_client_learns_the_load_by_every_transport(targets: list[str], transport: Transport, spec: Spec) -> None:
    inputs = random_inputs(spec, 1)
    with bngrad.Client(targets, transport=transport) as client:
        servers = client._calls._load_balancer._servers

        def are_known() -> bool:
            client.fused_batch_norm_grad_v2(*inputs)
            return all(server.capacity for server in servers.values())

        wait_until(are_known)


def test_grpcs_own_weighted_round_robin_reaches_every_server(targets: list[str]) -> None:
    """As the page on fleets shows it, by grpcio alone."""
    config = {"loadBalancingConfig": [{"weighted_round_robin": {"blackoutPeriod": "1s"}}]}
    options = [("grpc.service_config", json.dumps(config))]
    request = ops.V2.prepare(random_inputs(SMALL, 1), TensorFlowAttributes(1e-4, "NHWC", True, "variance", 0), None)
    with ExitStack() as stack:
        clients = [stack.enter_context(bngrad.Client(target)) for target in targets]
        channel = stack.enter_context(grpc.insecure_channel(f"ipv4:{','.join(targets)}", options))
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(ops.V2.method)

        def batches() -> list[int]:
            return [sum(client.server_info().batch_sizes) for client in clients]

        before = batches()

        def have_both_computed() -> bool:
            response = pb.FusedBatchNormGradV2Response.FromString(call(b"".join(request.pieces()), timeout=TIMEOUT_S))
            assert list(response.x_backprop.shape) == list(SMALL.shape)
            return all(after > count for after, count in zip(batches(), before, strict=True))

        wait_until(have_both_computed)


def test_both_stock_clients_of_a_unix_socket_get_reports(tmp_path: Path) -> None:
    request = ops.V2.prepare(random_inputs(SMALL, 1), TensorFlowAttributes(1e-4, "NHWC", True, "variance", 0), None)
    alone = [("grpc.use_local_subchannel_pool", 1)]  # with the global pool they would share a connection
    calls: list[grpc.UnaryUnaryMultiCallable[bytes, bytes]] = []
    told: set[int] = set()
    with ExitStack() as stack:
        target = stack.enter_context(EmbeddedServer(f"unix:{tmp_path}/socket", options=ONE_WORKER)).target
        for _ in range(2):
            calls.append(stack.enter_context(grpc.insecure_channel(target, alone)).unary_unary(ops.V2.method))

        def were_both_told() -> bool:
            for number, call in enumerate(calls):
                _, answered = call.with_call(b"".join(request.pieces()), timeout=TIMEOUT_S)
                if TEXT_HEADER in dict(answered.trailing_metadata()):
                    told.add(number)
            return told == {0, 1}

        wait_until(were_both_told)
