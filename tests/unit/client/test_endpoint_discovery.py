"""A server's endpoints, as calls that lose some and a client that closes find them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.clock import Clock
from tests.servers import wait_until
from tests.unit.client.endpoints import SECONDS, Server

from bngrad._credentials import NO_CREDENTIALS, Credentials, Security
from bngrad._deadline import ENDLESS, Cancellation, Deadline, acquire
from bngrad._errors import (
    BngradError,
    ClientClosedError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
)
from bngrad._transports import endpoints
from bngrad._transports.endpoints import EndpointDiscovery, Endpoints
from bngrad._transports.server_state import ServerState
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb


@pytest.fixture
def discovery(served: Server) -> Iterator[EndpointDiscovery]:
    with closing(EndpointDiscovery(served.target, NO_CREDENTIALS, ServerState())) as made:
        yield made


def test_an_endpoint_that_two_calls_lose_is_asked_for_once(served: Server, discovery: EndpointDiscovery) -> None:
    asked = []

    def ask(deadline: Deadline, cancellation: Cancellation) -> pb.Endpoints:
        asked.append(1)
        return served.endpoints

    def found() -> Endpoints:
        return discovery.endpoints(ask, ENDLESS, Cancellation())

    first = found()
    assert first.unix is not None
    discovery.lose(first, first.unix)
    second = found()
    assert (second.unix, second.tcp) == (None, first.tcp)
    discovery.lose(first, first.unix)
    assert found() is second
    assert len(asked) == 2


def test_the_memory_of_a_server_whose_socket_was_lost_is_given_back_at_once(
    served: Server, discovery: EndpointDiscovery
) -> None:
    found = discovery.endpoints(lambda *_: served.endpoints, ENDLESS, Cancellation())
    assert found.unix is not None
    assert found.pool is not None
    found.pool.empty((1,), np.dtype(np.float32), ENDLESS, Cancellation())
    assert len(served.regions) == 1
    discovery.lose(found, found.unix)
    wait_until(lambda: not len(served.regions))


def test_endpoints_that_are_found_as_the_client_closes_are_closed(served: Server, discovery: EndpointDiscovery) -> None:
    def ask(deadline: Deadline, cancellation: Cancellation) -> pb.Endpoints:
        discovery.close()
        return served.endpoints

    with pytest.raises(ClientClosedError) as raised:
        discovery.endpoints(ask, ENDLESS, Cancellation())
    # Sooner than the server ends a connection without calls.
    wait_until(lambda: [sock.fileno() for sock in served.local._sockets] == [-1], SECONDS / 2)
    assert raised.tb is not None  # which refers to them


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What the discovery of endpoints reads for the time."""
    clock = Clock()
    monkeypatch.setattr(endpoints, "time", SimpleNamespace(monotonic=clock))
    return clock


def lose_tcp(served: Server, discovery: EndpointDiscovery) -> Endpoints:
    """Loses the TCP port, and returns what is found without it."""
    before = ask_once(served, discovery)
    assert before.tcp is not None
    discovery.lose(before, before.tcp)
    found = ask_once(served, discovery)
    assert found.tcp is None
    return found


def ask_once(served: Server, discovery: EndpointDiscovery) -> Endpoints:
    return discovery.endpoints(lambda *_: served.endpoints, ENDLESS, Cancellation())


def test_an_endpoint_is_blocked_for_longer_only_if_it_is_lost_again_soon(
    served: Server, discovery: EndpointDiscovery, clock: Clock
) -> None:
    paused = []
    for rest in (0.0, 19.9, 40.0, 0.0):
        found = lose_tcp(served, discovery)
        paused.append(found.stale_at - clock.now)
        clock.now = found.stale_at + rest
    assert paused == pytest.approx([10.0, 20.0, 40.0, 10.0])


def test_an_endpoint_that_two_calls_lose_at_once_is_blocked_as_by_one(
    served: Server, discovery: EndpointDiscovery, clock: Clock
) -> None:
    before = ask_once(served, discovery)
    assert before.tcp is not None
    for _ in range(2):
        discovery.lose(before, before.tcp)
    assert ask_once(served, discovery).stale_at - clock.now == pytest.approx(10.0)


def test_an_endpoint_is_blocked_for_five_minutes_at_most(
    served: Server, discovery: EndpointDiscovery, clock: Clock
) -> None:
    for _ in range(8):
        found = lose_tcp(served, discovery)
        paused = found.stale_at - clock.now
        clock.now = found.stale_at
    assert paused == pytest.approx(300.0)


@pytest.mark.parametrize("is_tcp_first", [False, True])
def test_a_server_is_asked_again_when_the_first_of_its_endpoints_may_be_tried(
    served: Server, discovery: EndpointDiscovery, clock: Clock, is_tcp_first: bool
) -> None:
    first = ask_once(served, discovery)
    lost = [first.unix, first.tcp][:: -1 if is_tcp_first else 1]
    first_at = clock.now + 10.0
    for transport in lost:
        assert transport is not None
        discovery.lose(ask_once(served, discovery), transport)
        clock.now += 4.0
    assert ask_once(served, discovery).stale_at == pytest.approx(first_at)


@pytest.mark.parametrize(("was_connected", "losses"), [(False, 1), (True, 2)])
def test_a_port_that_was_reached_is_reported_as_unreachable_only_if_it_is_lost_again_soon(
    served: Server,
    discovery: EndpointDiscovery,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
    was_connected: bool,
    losses: int,
) -> None:
    for loss in range(1, 3):
        tcp = ask_once(served, discovery).tcp
        assert tcp is not None
        assert not was_connected or tcp.is_reachable()
        clock.now = lose_tcp(served, discovery).stale_at
        assert len(caplog.records) == (loss >= losses)


@pytest.mark.parametrize(("is_own", "reason"), [(False, "firewall"), (True, "answers grpcio")])
def test_the_report_of_an_unreachable_port_fits_where_it_is(
    served: Server, clock: Clock, caplog: pytest.LogCaptureFixture, is_own: bool, reason: str
) -> None:
    """The port that the client was given has answered, so no firewall is in its way."""
    served.endpoints.is_at_given_port = is_own
    target = f"localhost:{served.endpoints.stream_port if is_own else 1}"
    with closing(EndpointDiscovery(target, NO_CREDENTIALS, ServerState())) as discovery:
        lose_tcp(served, discovery)
    (record,) = caplog.records
    assert reason in record.message


@pytest.mark.parametrize("kind", [UnavailableError, DeadlineExceededError, UnauthenticatedError, InvalidArgumentError])
def test_endpoints_stay_unknown_if_the_server_cannot_be_asked(
    served: Server, discovery: EndpointDiscovery, kind: type[BngradError]
) -> None:
    def fail(deadline: Deadline, cancellation: Cancellation) -> pb.Endpoints:
        raise kind("not now")

    with pytest.raises(kind, match="not now"):
        discovery.endpoints(fail, ENDLESS, Cancellation())
    assert ask_once(served, discovery).tcp is not None


def test_a_service_that_does_not_know_of_endpoints_is_asked_once(
    served: Server, discovery: EndpointDiscovery, clock: Clock
) -> None:
    def fail(deadline: Deadline, cancellation: Cancellation) -> pb.Endpoints:
        raise UnimplementedError("what is that?")

    assert discovery.endpoints(fail, ENDLESS, Cancellation()) == Endpoints()
    clock.now += 1e6
    assert ask_once(served, discovery) == Endpoints()
    assert not discovery.is_remote


@pytest.mark.parametrize("kind", [InternalError, ResourceExhaustedError])
def test_a_server_that_cannot_tell_its_endpoints_is_asked_again_after_a_while(
    served: Server, discovery: EndpointDiscovery, clock: Clock, kind: type[BngradError]
) -> None:
    def fail(deadline: Deadline, cancellation: Cancellation) -> pb.Endpoints:
        raise kind("a proxy is in trouble")

    found = discovery.endpoints(fail, ENDLESS, Cancellation())
    assert (found.unix, found.tcp) == (None, None)
    assert ask_once(served, discovery) is found
    clock.now += 10.0
    assert ask_once(served, discovery).tcp is not None


def test_endpoints_that_are_found_while_others_are_lost_leave_no_connections(
    served: Server, discovery: EndpointDiscovery, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Endpoints] = []
    connect = EndpointDiscovery._connect

    def connect_and_note(discovery: EndpointDiscovery, *args: Any) -> Endpoints:
        made.append(connect(discovery, *args))  # so that none is closed because it is garbage
        return made[-1]

    monkeypatch.setattr(EndpointDiscovery, "_connect", connect_and_note)
    first = ask_once(served, discovery)
    assert first.unix is not None
    discovery.lose(first, first.unix)
    without_unix = ask_once(served, discovery)
    clock.now = without_unix.stale_at

    def ask(deadline: Deadline, cancellation: Cancellation) -> pb.Endpoints:
        if without_unix.tcp is not None and len(made) == 2:
            discovery.lose(without_unix, without_unix.tcp)
        return served.endpoints

    found = discovery.endpoints(ask, ENDLESS, Cancellation())
    assert found.unix is not None
    assert found.unix.is_reachable()
    local = served.local
    wait_until(lambda: local.connections == 4)
    # Sooner than the server ends a connection without calls.
    wait_until(lambda: sum(sock.fileno() != -1 for sock in local._sockets) == 1, SECONDS / 2)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_call_waits_for_the_question_of_another_one_until_it_is_late_or_cancelled(
    served: Server, discovery: EndpointDiscovery, is_cancelled: bool
) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def ask(deadline: Deadline, cancellation: Cancellation) -> pb.Endpoints:
        has_begun.set()
        assert may_end.wait(SECONDS)
        return served.endpoints

    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(discovery.endpoints, ask, ENDLESS, Cancellation())
        assert has_begun.wait(SECONDS)
        cancellation = Cancellation()
        if is_cancelled:
            cancellation.cancel()
            with pytest.raises(UnavailableError, match=f"the call to {served.target} was cancelled"):
                discovery.endpoints(ask, ENDLESS, cancellation)
        else:
            reason = "another call still waits for the server's endpoints"
            with pytest.raises(DeadlineExceededError, match=f"{served.target} .* 0.05 s.*{reason}"):
                discovery.endpoints(ask, Deadline.after(0.05), cancellation)
        may_end.set()
        found = other.result(SECONDS)
    assert discovery.endpoints(ask, ENDLESS, Cancellation()) is found


def test_calls_that_wait_for_the_question_of_another_one_ask_nothing(
    served: Server, discovery: EndpointDiscovery, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting, asked = list[int](), list[int]()

    def acquire_and_note(*args: Any) -> bool:
        waiting.append(1)
        return acquire(*args)

    def ask(deadline: Deadline, cancellation: Cancellation) -> pb.Endpoints:
        asked.append(1)
        wait_until(lambda: len(waiting) == 3)
        return served.endpoints

    monkeypatch.setattr(endpoints, "acquire", acquire_and_note)
    with ThreadPoolExecutor(3) as threads:
        deadline = Deadline.after(SECONDS)
        calls = [threads.submit(discovery.endpoints, ask, deadline, Cancellation()) for _ in range(3)]
    assert len({id(call.result()) for call in calls}) == len(asked) == 1


def test_a_socket_that_cannot_be_reached_from_the_start_is_used_for_nothing(
    served: Server, discovery: EndpointDiscovery
) -> None:
    served.endpoints.local_directory = "/nowhere"
    found = ask_once(served, discovery)
    assert (found.unix, found.pool, found.is_local) == (None, None, False)
    assert found.tcp is not None


@pytest.mark.parametrize(
    ("target", "host", "port", "address"),
    [
        ("name:1", "", 65535, ("name", 65535)),
        ("dns:name:1", "", 0, None),
        ("name:1", "other", 2, ("other", 2)),
        ("unix:/nowhere", "other", 2, ("other", 2)),
        ("unix:/nowhere", "", 2, None),
        ("name:1", "", 65536, None),
        ("name:1", "other", 0, None),
    ],
)
def test_the_address_for_large_tensors_is_at_the_host_that_the_server_names_or_the_clients(
    target: str, host: str, port: int, address: tuple[str, int] | None
) -> None:
    with closing(EndpointDiscovery(target, NO_CREDENTIALS, ServerState())) as discovery:
        advertised = pb.Endpoints(stream_host=host, stream_port=port)
        tcp = discovery.endpoints(lambda *_: advertised, ENDLESS, Cancellation()).tcp
        assert (None if tcp is None else tcp.address) == address


@pytest.mark.parametrize(
    ("target", "address"), [("name:1", ("name", 1)), ("dns:name:1", ("name", 1)), ("unix:/nowhere", None)]
)
def test_a_client_connects_to_the_port_that_it_was_given_if_the_server_is_there(
    target: str, address: tuple[str, int] | None
) -> None:
    with closing(EndpointDiscovery(target, NO_CREDENTIALS, ServerState())) as discovery:
        advertised = pb.Endpoints(stream_port=2, is_at_given_port=True)
        tcp = discovery.endpoints(lambda *_: advertised, ENDLESS, Cancellation()).tcp
        assert (None if tcp is None else tcp.address) == address


@pytest.mark.parametrize(
    ("host", "is_insecure", "is_used"),
    [
        ("192.0.2.1", False, False),
        ("192.0.2.1", True, True),
        ("127.0.0.2", False, True),
        ("", False, True),
    ],
)
def test_a_token_is_not_sent_unencrypted_to_a_host_that_the_server_names(
    host: str, is_insecure: bool, is_used: bool
) -> None:
    credentials = Credentials(Security(token=lambda: "alice", insecure=is_insecure), "127.0.0.1:1")
    with closing(EndpointDiscovery("127.0.0.1:1", credentials, ServerState())) as discovery:
        advertised = pb.Endpoints(stream_host=host, stream_port=2)
        found = discovery.endpoints(lambda *_: advertised, ENDLESS, Cancellation())
        assert (found.tcp is not None) == is_used
