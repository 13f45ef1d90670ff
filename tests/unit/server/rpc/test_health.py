"""The health service: what it reports when workers come and go at the same moment."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2 as pb
from tests.unit.server.rpc.peers import Peer, identity

from bngrad_server.rpc.health import Health
from bngrad_server.rpc.servicer import SERVER_INFO_PATH

TIMEOUT_S = 20.0


def is_serving(health: Health) -> bool:
    response = health.Check(pb.HealthCheckRequest(), cast(Any, None))
    return response.status == pb.HealthCheckResponse.SERVING


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


class _Watcher:
    """The context of a watching call, which can wake it."""

    def __init__(self) -> None:
        self.has_ended = False
        self.steps: list[Callable[[], None]] = []
        """What happens before the call looks for changes, each time."""
        self.looks = 0
        self.wake: Callable[[], None] = lambda: None

    def add_callback(self, callback: Callable[[], None]) -> bool:
        self.wake = callback
        return True

    def is_active(self) -> bool:
        self.looks += 1
        if self.steps:
            self.steps.pop(0)()
        return not self.has_ended


def test_who_watches_is_told_of_the_end_also_if_woken_while_it_begins() -> None:
    health, watcher = Health(("",)), _Watcher()
    health.update(lambda: True)
    changes = health.Watch(pb.HealthCheckRequest(), cast(Any, watcher))
    assert next(changes).status == pb.HealthCheckResponse.SERVING
    asked, may_answer = threading.Event(), threading.Event()

    def slowly() -> bool:
        asked.set()
        return may_answer.wait(TIMEOUT_S)

    with ThreadPoolExecutor() as threads:
        slow = threads.submit(health.update, slowly)
        assert asked.wait(TIMEOUT_S)
        closed = threads.submit(health.close)
        wait([closed], 0.2)  # it would end within that, did it not wait for the slow one
        watcher.wake()
        last = threads.submit(list, changes)
        wait([last], 0.2)
        may_answer.set()
        for each in (slow, closed):
            each.result(TIMEOUT_S)
    assert [response.status for response in last.result()][-1:] == [pb.HealthCheckResponse.NOT_SERVING]


@pytest.mark.parametrize(
    ("service", "told"),
    [("", ["NOT_SERVING", "SERVING", "NOT_SERVING"]), ("unknown", ["SERVICE_UNKNOWN"])],
    ids=["known", "unknown"],
)
def test_who_watches_is_told_of_changes_alone(service: str, told: list[str]) -> None:
    health, watcher = Health(("",)), _Watcher()
    answers = [False, False, True, True]
    watcher.steps = [lambda: health.update(lambda: answers.pop(0)) for _ in answers] + [health.close]
    changes = health.Watch(pb.HealthCheckRequest(service=service), cast(Any, watcher))
    assert [pb.HealthCheckResponse.ServingStatus.Name(response.status) for response in changes] == told
    assert not answers


def test_a_watching_call_that_ends_keeps_no_thread_and_is_forgotten() -> None:
    health, watcher = Health(("",)), _Watcher()
    changes = health.Watch(pb.HealthCheckRequest(), cast(Any, watcher))
    assert next(changes).status == pb.HealthCheckResponse.NOT_SERVING
    with ThreadPoolExecutor() as threads:
        rest = threads.submit(list, changes)
        watcher.wake()
        wait([rest], 0.1)  # it would look again and again, did it not wait for the next change
        watcher.has_ended = True
        watcher.wake()
        try:
            assert rest.result(TIMEOUT_S) == []
        finally:
            health.close()  # ends it in any case
    assert watcher.looks <= 3
    assert not health._watchers


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
