"""Connections before their first call: what they may take, and for how long."""

from __future__ import annotations

import errno
import math
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
from tests.raw_http2 import is_closed
from tests.security.authority import Authority
from tests.unit.server.rpc.http2.service import PATH, REQUEST, Service, ask, check_answered, check_works, code_of
from tests.unit.server.workers.additions import TIMEOUT_S, wait_until

from bngrad_server.errors import UnauthenticatedError
from bngrad_server.rpc.http2.accepting import strangers
from bngrad_server.rpc.http2.accepting.stranger import Stranger
from bngrad_server.rpc.http2.limits.penalties import Penalties
from bngrad_server.runtime.event_loop import EventLoop
from bngrad_server.security.auth import Authenticator
from bngrad_server.security.tokens import Tokens
from bngrad_wire import http2
from bngrad_wire.http2 import ServerConnection, frames
from bngrad_wire.http2.errors import ErrorCode
from bngrad_wire.http2.header_block import encode
from bngrad_wire.token_format import new_token

TOKEN, LINE = new_token("alice")
GOOD, WRONG = ((("authorization", f"Bearer {token}"),) for token in (TOKEN, "wrong"))
PREFACE = frames.PREFACE + frames.settings({})
UNAUTHENTICATED = 16
DELAY_S = 2.0
PING = frames.frame(frames.PING, 0, 0, bytes(8))
BLOCK = encode([(":method", "POST"), (":path", PATH), ("content-type", "application/grpc")])
REFUSED = frames.frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, 1, BLOCK)

PLACES = 128


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    """A port that needs tokens."""
    tokens = tmp_path / "tokens"
    tokens.write_text(LINE)
    service = Service(tmp_path, Authenticator(Tokens(tokens)))
    yield service
    service.close()


def refused(service: Service, reason: str) -> int:
    count: int = service.engine.observer.metrics.status()["refused_connections"][reason]
    return count


def score_of(service: Service, peer: str) -> float:
    """What is left of the breaches that are counted for a peer."""
    return service.port._strangers._penalties._scores.of(peer)


CALL = frames.frame(frames.HEADERS, frames.END_HEADERS, 1, encode([(":scheme", "http")]) + BLOCK) + frames.frame(
    frames.DATA, frames.END_STREAM, 1, b"\0" + len(REQUEST).to_bytes(4, "big") + REQUEST
)
BEGUN = {
    "nothing": b"",
    "half a preface": PREFACE[:12],
    "no call": PREFACE,
    "half a frame": PREFACE + REFUSED[:20],
    "half a header block": PREFACE + frames.frame(frames.HEADERS, 0, 1, BLOCK[:20]),
    "a call without a token": PREFACE + REFUSED,
}


@pytest.mark.parametrize("over_tcp", [False, True], ids=["Unix", "TCP"])
@pytest.mark.parametrize("said", BEGUN.values(), ids=BEGUN)
def test_who_shows_no_token_is_closed_soon_and_gets_no_thread(
    service: Service, monkeypatch: pytest.MonkeyPatch, said: bytes, over_tcp: bool
) -> None:
    monkeypatch.setattr(strangers, "_CALL_TIMEOUT_S", 0.5)
    before = set(threading.enumerate())
    bad = [service.socket(over_tcp=over_tcp) for _ in range(20)]
    for sock in bad:
        sock.sendall(said)
    assert all(map(is_closed, bad))
    assert set(threading.enumerate()) <= before
    assert refused(service, "silent") == 20
    check_answered(ask(service.connect(), metadata=GOOD))


def test_who_has_begun_a_call_in_time_is_not_closed_because_the_server_is_late(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strangers, "_CALL_TIMEOUT_S", 60.0)
    connections = [service.connect() for _ in range(20)]
    port, asked = service.port._strangers, threading.Event()

    def be_late() -> None:
        asked.wait(20)
        time.sleep(0.2)  # so that a tick is due
        for stranger in port._all:
            stranger.until = 0.0

    wait_until(lambda: len(port._all) == 20)
    port._event_loop.call_soon(be_late)
    calls = [ask(connection, metadata=GOOD) for connection in connections]
    asked.set()
    check_answered(*calls)


@pytest.mark.parametrize("over_tcp", [False, True], ids=["Unix", "TCP"])
def test_strangers_take_no_places_of_others(service: Service, monkeypatch: pytest.MonkeyPatch, over_tcp: bool) -> None:
    """The one that has been there longest goes first."""
    monkeypatch.setattr(strangers, "_CALL_TIMEOUT_S", 60.0)  # none is closed because it is silent
    service.port._strangers._remote.count = PLACES
    good = service.connect(over_tcp=over_tcp)
    check_answered(ask(good, metadata=GOOD))
    bad = [service.socket(over_tcp=over_tcp) for _ in range(200)]
    first, last = bad[0], bad[-1]
    wait_until(lambda: refused(service, "full") >= 200 - PLACES)
    assert is_closed(first)
    last.settimeout(0.1)
    assert not is_closed(last)
    assert good.usable
    check_answered(ask(good, metadata=GOOD))
    check_answered(ask(service.connect(over_tcp=not over_tcp), metadata=GOOD))


FLOODS = {
    "WINDOW_UPDATE on a closed stream": frames.window_update(1, 1),
    "DATA on a closed stream": frames.frame(frames.DATA, 0, 1, b"x"),
    "PING": frames.frame(frames.PING, 0, 0, bytes(8)),
    "SETTINGS": frames.settings({}),
    "bytes of half a frame": b"\0",
}


@pytest.mark.parametrize("over_tcp", [False, True], ids=["Unix", "TCP"])
@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
def test_a_stranger_that_floods_is_closed(
    service: Service, monkeypatch: pytest.MonkeyPatch, flood: bytes, over_tcp: bool
) -> None:
    monkeypatch.setattr(strangers, "_CALL_TIMEOUT_S", 60.0)  # a busy server may take long to see enough of the flood
    sock = service.socket(over_tcp=over_tcp)
    sock.sendall(PREFACE + REFUSED)
    with suppress(OSError):
        while not refused(service, "protocol"):
            sock.sendall(flood * (1 if flood == b"\0" else 200))
            time.sleep(0.005)
    wait_until(lambda: refused(service, "protocol") == 1)


def test_what_a_stranger_that_flooded_has_left_behind_is_not_read(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, turns = service.port._strangers, []
    accept = http2.MultiplexedConnection.accept_nonblocking

    def noted(self: http2.MultiplexedConnection) -> http2.ServerCall | None:
        turns.append(self)
        return accept(self)

    monkeypatch.setattr(http2.MultiplexedConnection, "accept_nonblocking", noted)
    may_begin = threading.Event()
    port._event_loop.call_soon(partial(wait_until, may_begin.is_set))
    sock = service.socket()
    sock.sendall(PREFACE + REFUSED + FLOODS["PING"] * 1000)
    sock.shutdown(socket.SHUT_WR)
    may_begin.set()
    wait_until(lambda: bool(turns) and not port._all)
    assert len(turns) == strangers._FIRST_TURNS
    assert not port._event_loop._readers.keys() & {turns[0].io._sock.fileno()}


def test_new_strangers_come_before_those_that_have_said_much(service: Service) -> None:
    port, sock = service.port._strangers, service.socket()
    loop = port._event_loop
    sock.sendall(PREFACE + REFUSED)
    wait_until(lambda: any(stranger.turns for stranger in list(port._all)))
    (stranger,) = port._all
    assert stranger.fd in loop._priority_readers
    while stranger.turns <= strangers._FIRST_TURNS:
        sock.sendall(PING)
        time.sleep(0.005)
    wait_until(lambda: stranger.fd in loop._readers)
    assert stranger.fd not in loop._priority_readers
    sock.close()
    wait_until(lambda: not port._all)
    wait_until(lambda: stranger.fd not in loop._readers)


def test_nothing_is_kept_of_a_stranger_that_broke_the_protocol(service: Service) -> None:
    readers = service.port._strangers._event_loop._readers
    before = set(readers)
    for sock in [service.socket() for _ in range(8)]:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
    wait_until(lambda: refused(service, "protocol") == 8)
    wait_until(lambda: set(readers) == before)


def test_a_wrong_token_is_answered_and_a_right_one_on_the_same_connection_too(service: Service) -> None:
    connection = service.connect()
    for _ in range(3):
        assert code_of(ask(connection, metadata=WRONG)) == UNAUTHENTICATED
    check_answered(ask(connection, metadata=GOOD))


def test_a_connection_whose_token_is_no_longer_valid_is_a_stranger_again(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strangers, "_CALL_TIMEOUT_S", 0.5)
    connection = service.connect()
    check_answered(ask(connection, metadata=GOOD))
    assert service.port.connections == 1
    assert code_of(ask(connection, metadata=WRONG)) == UNAUTHENTICATED
    wait_until(lambda: service.port.connections == 0)
    wait_until(lambda: not connection.usable)


def test_a_connection_whose_token_is_no_longer_valid_is_closed_where_no_more_are_accepted(service: Service) -> None:
    """Since the server is stopping."""
    connection = service.connect()
    check_answered(ask(connection, metadata=GOOD))
    service.port._strangers.stop()
    assert code_of(ask(connection, metadata=WRONG)) == UNAUTHENTICATED
    wait_until(lambda: not connection.usable)


def test_connections_of_a_peer_that_broke_the_protocol_wait_and_others_do_not(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Penalties, "delay_s", lambda self, peer: DELAY_S if self._scores.of(peer) else 0.0)
    good = service.connect(over_tcp=True)
    check_answered(ask(good, metadata=GOOD))
    bad = service.socket(over_tcp=True)
    bad.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert is_closed(bad)
    wait_until(lambda: refused(service, "protocol") == 1)
    began = time.monotonic()
    check_answered(ask(good, metadata=GOOD), ask(service.connect(), metadata=GOOD))
    assert time.monotonic() - began < DELAY_S
    check_answered(ask(service.connect(over_tcp=True), metadata=GOOD))
    assert time.monotonic() - began >= 0.9 * DELAY_S


def test_a_client_that_broke_the_protocol_waits_wherever_it_comes_from(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Penalties, "delay_s", lambda self, peer: DELAY_S if self._scores.of(peer) else 0.0)
    bad = service.connect(over_tcp=True)
    check_answered(ask(bad, metadata=GOOD))
    bad.io.send([frames.frame(frames.GOAWAY, 0, 1, bytes(8))])
    wait_until(lambda: refused(service, "protocol") == 1)
    began = time.monotonic()
    check_answered(ask(service.connect(), metadata=GOOD))
    assert time.monotonic() - began >= 0.9 * DELAY_S


def test_a_breach_counts_at_once_since_new_connections_are_read_before_callbacks(service: Service) -> None:
    port, go_on = service.port._strangers, threading.Event()
    port._event_loop.call_soon(partial(wait_until, go_on.is_set))
    port.penalise("192.0.2.1", 4.0)
    assert score_of(service, "192.0.2.1") > 0
    go_on.set()


def test_a_client_that_broke_the_protocol_is_not_trusted_on_its_next_connection(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Penalties, "delay_s", lambda self, peer: 0.01 if self._scores.of(peer) else 0.0)
    distrust = mock.Mock()
    monkeypatch.setattr(ServerConnection, "distrust", distrust)
    bad = service.connect(over_tcp=True)
    check_answered(ask(bad, metadata=GOOD))
    distrust.assert_not_called()
    bad.io.send([frames.frame(frames.GOAWAY, 0, 1, bytes(8))])
    wait_until(lambda: refused(service, "protocol") == 1)
    check_answered(ask(service.connect(), metadata=GOOD))
    distrust.assert_called_once()


def test_who_does_not_shake_hands_is_closed_soon(
    tls_service: tuple[Service, Authority], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strangers, "_HANDSHAKE_TIMEOUT_S", 0.5)
    service, _ = tls_service
    assert all(map(is_closed, [service.socket(over_tcp=True) for _ in range(5)]))
    assert refused(service, "handshake") == 5


def test_no_handshake_is_late_for_a_time_in_which_the_server_itself_was_stopped(
    tls_service: tuple[Service, Authority], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strangers, "_HANDSHAKE_TIMEOUT_S", 1.0)
    service, _ = tls_service
    port, sock = service.port._strangers, service.socket(over_tcp=True)
    wait_until(lambda: len(port._all) == 1)
    resumed = threading.Event()
    port._event_loop.call_soon(partial(time.sleep, 1.5))
    port._event_loop.call_soon(resumed.set)
    assert resumed.wait(TIMEOUT_S)
    time.sleep(0.3)  # so that it has looked for late ones
    assert len(port._all) == 1
    assert is_closed(sock)


def test_a_failed_handshake_counts_against_its_peer(tls_service: tuple[Service, Authority]) -> None:
    service, _ = tls_service
    sock = service.socket(over_tcp=True)
    sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert is_closed(sock)
    assert score_of(service, "127.0.0.1") > 0
    assert refused(service, "handshake") == 1


@pytest.mark.parametrize("over_tcp", [False, True], ids=["Unix", "TCP"])
def test_a_peer_that_leaves_without_a_call_leaves_its_place_and_counts_over_tcp(
    service: Service, over_tcp: bool
) -> None:
    port, sock = service.port._strangers, service.socket(over_tcp=over_tcp)
    wait_until(lambda: len(port._all) == 1)
    (stranger,) = port._all
    sock.close()
    wait_until(lambda: not port._all and not len(port._local) and not len(port._remote))
    wait_until(lambda: stranger.sock.fileno() == -1)
    assert (score_of(service, stranger.peer) > 0) == over_tcp
    check_answered(ask(service.connect(over_tcp=over_tcp), metadata=GOOD))
    wait_until(lambda: not len(port._local) and not len(port._remote))


def test_a_flood_of_strangers_takes_no_place_of_another_peer(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "_CALL_TIMEOUT_S", 60.0)
    other = service.socket(over_tcp=True, source="127.0.0.2")
    port = service.port._strangers
    port._remote.count = PLACES
    wait_until(lambda: len(port._all) == 1)
    for _ in range(200):
        service.socket(over_tcp=True)
    wait_until(lambda: refused(service, "full") > 200 - PLACES)
    other.settimeout(0.1)
    assert not is_closed(other)


def test_a_peer_whose_flood_has_all_places_does_not_wait(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else no connection of its address, good or bad, might keep its place until its wait ends."""
    monkeypatch.setattr(Penalties, "delay_s", lambda self, peer: math.inf if peer == "127.0.0.1" else 0.0)
    port = service.port._strangers
    port._remote.count = PLACES
    flood = [service.socket(over_tcp=True) for _ in range(PLACES)]
    wait_until(lambda: len(port._all) == PLACES)
    check_answered(ask(service.connect(over_tcp=True), metadata=GOOD))
    assert is_closed(flood[0])


def test_a_first_call_after_more_frames_than_are_handled_at_a_time_is_answered(service: Service) -> None:
    client = service.connect()
    client.outbound.append(PING * 700)
    check_answered(ask(client, metadata=GOOD))


def test_a_connection_whose_first_call_is_reset_at_once_is_a_stranger_until_the_next(service: Service) -> None:
    client = service.connect()
    reset = client.call(PATH, metadata=GOOD)
    client.outbound.append(frames.rst_stream(reset.id, ErrorCode.CANCEL))
    client.close_stream(reset)
    client.ping()
    while client.unanswered_ping:
        client.handle_frame()
    assert service.port.connections == 0
    check_answered(ask(client, metadata=GOOD))


def test_what_a_connection_has_said_after_a_call_whose_token_is_no_longer_valid_is_heard(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has read it already, so its socket does not become readable again."""
    client = service.connect()
    check_answered(ask(client, metadata=GOOD))
    authenticate, errors = Authenticator.authenticate, iter([UnauthenticatedError()])

    def refuse_once(authenticator: Authenticator, authorization: str | None, default: str) -> str:
        for error in errors:
            raise error
        return authenticate(authenticator, authorization, default)

    monkeypatch.setattr(Authenticator, "authenticate", refuse_once)
    given_up = client.call(PATH, metadata=GOOD)
    given_up.send_message(REQUEST, end=True, more=True)
    client.outbound.append(frames.rst_stream(given_up.id, ErrorCode.CANCEL))
    client.close_stream(given_up)
    check_answered(ask(client, metadata=GOOD))
    assert next(errors, None) is None


def test_a_connection_waits_once_where_its_client_is_known_before_its_call(
    tls_service: tuple[Service, Authority], monkeypatch: pytest.MonkeyPatch
) -> None:
    delays = iter([0.01])
    monkeypatch.setattr(Penalties, "delay_s", lambda self, peer: next(delays, math.inf))
    service, _ = tls_service
    check_answered(ask(service.connect()))
    assert next(delays, None) is None


def test_a_stranger_that_has_had_its_turns_is_told_so_and_closed_in_time(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strangers, "_MAX_TURNS", 1)
    monkeypatch.setattr(strangers, "_LAST_WORDS_S", math.inf)
    port, sock = service.port._strangers, service.socket()
    sock.sendall(PREFACE)
    wait_until(lambda: any(stranger.has_ended for stranger in list(port._all)))
    (stranger,) = port._all
    received = b""
    while frames.frame(frames.GOAWAY, 0, 0, bytes(8)) not in received:
        data = sock.recv(2**16)
        assert data
        received += data
    assert stranger.fd not in port._event_loop._readers
    sock.sendall(PING)
    stranger.until = 0.0
    assert is_closed(sock)
    wait_until(lambda: not port._all)
    assert score_of(service, stranger.peer) > 0


def test_who_waits_because_of_its_breaches_is_not_closed_for_its_silence(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Penalties, "delay_s", lambda self, peer: math.inf if peer == "token alice" else 0.0)
    port, looked = service.port._strangers, threading.Event()
    call = ask(service.connect(), metadata=GOOD)
    wait_until(lambda: any(stranger.introduction is not None for stranger in list(port._all)))
    (stranger,) = port._all

    def look() -> None:
        stranger.resumes_at, stranger.until = time.monotonic() + 600, 0.0
        port._on_tick()
        stranger.resumes_at = 0.0
        looked.set()

    port._event_loop.call_soon(look)
    assert looked.wait(TIMEOUT_S)
    check_answered(call)


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (http2, "MultiplexedConnection", MemoryError()),
        (EventLoop, "add_reader", OSError(errno.ENOSPC, "too many descriptors are watched")),
        (Stranger, "begin_handshake", MemoryError()),
    ],
)
def test_a_connection_for_which_the_system_has_no_means_is_closed_and_others_are_served(
    tls_service: tuple[Service, Authority], monkeypatch: pytest.MonkeyPatch, owner: object, name: str, error: Exception
) -> None:
    """Also one that has called already."""
    service, _ = tls_service

    def fail(*args: object) -> None:
        raise error

    with monkeypatch.context() as failing:
        failing.setattr(owner, name, fail)
        sock = service.socket(over_tcp=name == "begin_handshake")
        with suppress(OSError):  # it may have been closed already
            sock.sendall(PREFACE + CALL)
        assert is_closed(sock)
    wait_until(lambda: not service.port._strangers._all)
    check_works(service)
