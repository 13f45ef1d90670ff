"""The health service: what it reports when workers come and go at the same moment."""

from __future__ import annotations

import threading

import grpc
import pytest
from grpc_health.v1 import health_pb2 as pb
from tests.unit.server.rpc.peers import Peer, identity

from bngrad_server.rpc.health import Health
from bngrad_server.rpc.servicer import SERVER_INFO_PATH

TIMEOUT_S = 20.0


def is_serving(health: Health) -> bool:
    return health.check("").status == pb.HealthCheckResponse.SERVING


def test_health_does_not_fall_back_to_what_it_was_before_a_worker_was_ready() -> None:
    health = Health(("",))
    asked, may_answer = threading.Event(), threading.Event()

    def not_yet() -> bool:
        asked.set()
        assert may_answer.wait(TIMEOUT_S)
        return False

    slow = threading.Thread(target=health.update, args=(not_yet,))
    slow.start()
    assert asked.wait(TIMEOUT_S)
    quick = threading.Thread(target=health.update, args=(lambda: True,))
    quick.start()
    quick.join(0.2)  # it would end within that, did it not wait for the slow one
    may_answer.set()
    slow.join()
    quick.join()
    assert is_serving(health)


def test_a_closed_server_never_serves_again() -> None:
    health = Health(("",))
    assert not is_serving(health)
    health.update(lambda: True)
    assert is_serving(health)
    health.close()
    health.update(lambda: True)
    assert not is_serving(health)


@pytest.mark.parametrize(
    ("path", "request_nbytes", "code"),
    [
        ("/grpc.health.v1.Health/Check", 60_000, grpc.StatusCode.NOT_FOUND),
        ("/" + "x" * 7000, 0, grpc.StatusCode.UNIMPLEMENTED),
    ],
)
def test_an_answer_that_quotes_a_long_name_fits_the_metadata_of_clients(
    peer: Peer, path: str, request_nbytes: int, code: grpc.StatusCode
) -> None:
    request = pb.HealthCheckRequest(service="x" * request_nbytes).SerializeToString()
    with pytest.raises(grpc.RpcError) as refused:
        peer.channel.unary_unary(path, identity, identity)(request, timeout=TIMEOUT_S)
    assert refused.value.code() is code
    assert len(refused.value.details() or "") < 2000


@pytest.mark.parametrize("path", ["/grpc.health.v1.Health/Check", SERVER_INFO_PATH])
def test_a_unary_call_has_one_answer_to_its_first_message(peer: Peer, path: str) -> None:
    call = peer.channel.stream_stream(path, identity, identity)
    assert len(list(call(iter([b"", b""]), timeout=TIMEOUT_S))) == 1
    with pytest.raises(grpc.RpcError) as refused:
        list(call(iter([]), timeout=TIMEOUT_S))
    assert (refused.value.code(), refused.value.details()) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "the call has no request",
    )
