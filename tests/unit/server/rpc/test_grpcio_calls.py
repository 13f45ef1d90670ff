"""Calls whose messages end before the request is whole: those of a client that sends no more, or has cancelled."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from tests.unit.server.rpc.peers import PORTS, Peer, identity, peer_behind
from tests.unit.server.workers.additions import NBYTES, TIMEOUT_S, inputs, request_of, wait_until

from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_server.rpc import grpcio_calls, grpcio_ops
from bngrad_server.rpc.servicer import EXCHANGE_PATH, UNARY_OPS
from bngrad_server.runtime.traffic_accounts import OpTraffic

AT_ONCE_S = 2.0
CALLS = 32
(UNARY_PATH, UNARY_NAME), *_ = UNARY_OPS.items()


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    with peer_behind(PORTS["grpcio"], tmp_path) as peer:
        yield peer


def partial_exchange() -> list[bytes]:
    """The messages of an exchange without the last bytes of its tensors."""
    request = request_of(inputs(), chunked=True)
    header = pb.ExchangeRequest(fused_batch_norm_grad_v3=request).SerializeToString()
    return [header, pb.ExchangeRequest(chunk=bytes(NBYTES)).SerializeToString()]


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The threads of the handlers that wait for a message that their call needs."""
    waiting: set[int] = set()

    def receive_required(messages: Iterator[bytes], op: OpTraffic) -> bytes | None:
        waiting.add(threading.get_ident())
        try:
            return grpcio_calls.receive_required(messages, op)
        finally:
            waiting.remove(threading.get_ident())

    monkeypatch.setattr(grpcio_ops, "receive_required", receive_required)
    return waiting


@pytest.mark.parametrize("path", [UNARY_PATH, EXCHANGE_PATH])
def test_a_call_without_its_whole_request_is_refused_at_once(peer: Peer, path: str) -> None:
    messages = [] if path == UNARY_PATH else partial_exchange()
    call = peer.channel.stream_stream(path, identity, identity)
    began = time.monotonic()
    with pytest.raises(grpc.RpcError) as refused:
        list(call(iter(messages), timeout=TIMEOUT_S))
    assert time.monotonic() - began < AT_ONCE_S
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    if path == UNARY_PATH:
        assert refused.value.details() == "the call has no request"


@pytest.mark.parametrize("path", [UNARY_PATH, EXCHANGE_PATH])
def test_a_call_that_is_cancelled_before_its_request_is_whole_counts_as_cancelled(
    waiting: set[int], peer: Peer, path: str
) -> None:
    def codes() -> list[str]:
        requests = peer.engine.observer.metrics.status()["requests"]
        return [code for _, _, code, count in requests for _ in range(count)]

    def messages() -> Iterator[bytes]:
        yield from [] if path == UNARY_PATH else partial_exchange()
        may_end.wait(TIMEOUT_S)

    may_end = threading.Event()
    calls = [peer.channel.stream_stream(path, identity, identity)(messages(), timeout=TIMEOUT_S) for _ in range(CALLS)]
    wait_until(lambda: len(waiting) == CALLS)
    for call in calls:
        call.cancel()
    may_end.set()
    wait_until(lambda: len(codes()) == CALLS)
    assert set(codes()) == {"CANCELLED"}
