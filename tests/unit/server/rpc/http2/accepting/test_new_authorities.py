"""Connections that were verified by authorities of clients that are no longer the current ones."""

from __future__ import annotations

import os
import ssl
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from tests.raw_http2 import is_closed
from tests.security.authority import Authority
from tests.unit.server.rpc.http2.service import PATH, REQUEST, Service, ask, check_answered, look_between_events
from tests.unit.server.workers.additions import wait_until

from bngrad_server.rpc.http2.accepting import strangers
from bngrad_server.rpc.http2.connections import Http2Connections
from bngrad_wire import http2
from bngrad_wire.http2 import frames
from bngrad_wire.http2.header_block import encode
from bngrad_wire.http2.sockets import tls

PREFACE = frames.PREFACE + frames.settings({})
BLOCK = encode([(":scheme", "http"), (":method", "POST"), (":path", PATH), ("content-type", "application/grpc")])
CALL = frames.frame(frames.HEADERS, frames.END_HEADERS, 1, BLOCK) + frames.frame(
    frames.DATA, frames.END_STREAM, 1, b"\0" + len(REQUEST).to_bytes(4, "big") + REQUEST
)


def trust_another_too(authority: Authority, directory: Path) -> None:
    """Adds an authority to the one that a server trusts."""
    both = authority.path.read_bytes() + Authority(directory, "another").path.read_bytes()
    draft = directory / "both.pem"
    draft.write_bytes(both)
    draft.replace(authority.path)


def alice_of(authority: Authority) -> ssl.SSLContext:
    pair = authority.issue("alice")
    context = ssl.create_default_context(cafile=authority.path)
    context.load_cert_chain(pair.certificate, pair.key)
    tls.prepare(context)
    return context


def hears_goaway(sock: ssl.SSLSocket) -> bool:
    """Whether the server says that it has begun no call, answers none, and closes."""
    received, kinds = b"", []
    with suppress(OSError):
        while data := sock.recv(2**16):
            received += data
    while received:
        length, kind, _, _ = frames.parse_header(received, 0)
        kinds.append((kind, received[frames.HEADER_NBYTES :][:4] if kind == frames.GOAWAY else b""))
        received = received[frames.HEADER_NBYTES + length :]
    return (
        kinds[0][0] == frames.SETTINGS and kinds[-1] == (frames.GOAWAY, bytes(4)) and (frames.HEADERS, b"") not in kinds
    )


def test_connections_end_when_other_authorities_of_clients_are_trusted(
    tls_service: tuple[Service, Authority], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that have been in use, and those that have said nothing yet; but not local ones, which need none."""
    monkeypatch.setattr(strangers, "_CALL_TIMEOUT_S", 60.0)
    service, authority = tls_service
    context = alice_of(authority)
    used, silent = (context.wrap_socket(service.socket(over_tcp=True), server_hostname="127.0.0.1") for _ in range(2))
    with used, silent:
        used.sendall(PREFACE + CALL)
        silent.sendall(PREFACE)
        local = service.connect()
        check_answered(ask(local))
        wait_until(lambda: service.port.connections == 2)
        clients = {connection.client for connection in service.port._connections._all}
        assert clients == {"certificate alice", f"process {os.getpid()}"}
        Authority(tmp_path, "another").path.replace(authority.path)
        assert is_closed(used)
        assert is_closed(silent)
        check_answered(ask(local))
        assert service.port._strangers._client_ca == authority.path.read_bytes()


def test_who_began_to_shake_hands_with_former_authorities_is_told_to_call_again(
    tls_service: tuple[Service, Authority], tmp_path: Path
) -> None:
    """Were it closed instead, a stock client would report UNAVAILABLE rather than connect once more."""
    service, authority = tls_service
    context, port = alice_of(authority), service.port._strangers
    sock = service.socket(over_tcp=True)
    wait_until(lambda: any(isinstance(stranger.sock, ssl.SSLSocket) for stranger in list(port._all)))
    trust_another_too(authority, tmp_path)
    wait_until(lambda: port._client_ca == authority.path.read_bytes())
    with context.wrap_socket(sock, server_hostname="127.0.0.1") as late:
        late.sendall(PREFACE + CALL)
        assert hears_goaway(late)
    assert service.port.connections == 0
    assert port._penalties._scores.of("127.0.0.1") == 0
    with context.wrap_socket(service.socket(over_tcp=True), server_hostname="127.0.0.1") as again:
        check_answered(ask(http2.ClientConnection(again, "here")))


def test_who_was_verified_by_former_authorities_and_has_not_called_is_told_to_call_again(
    tls_service: tuple[Service, Authority], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strangers, "_CALL_TIMEOUT_S", 60.0)
    service, authority = tls_service
    port = service.port._strangers
    with alice_of(authority).wrap_socket(service.socket(over_tcp=True), server_hostname="127.0.0.1") as silent:
        silent.sendall(PREFACE)
        wait_until(lambda: any(stranger.http is not None for stranger in list(port._all)))
        trust_another_too(authority, tmp_path)
        wait_until(lambda: any(stranger.has_ended for stranger in list(port._all)))
        silent.sendall(CALL)
        assert hears_goaway(silent)
    assert service.port.connections == 0


def test_who_began_to_shake_hands_with_new_authorities_stays(
    tls_service: tuple[Service, Authority], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection may be the first to find that the file has changed."""
    monkeypatch.setattr(strangers, "_CALL_TIMEOUT_S", 60.0)
    service, authority = tls_service
    context, port = alice_of(authority), service.port._strangers
    tick, port._event_loop.on_tick = port._event_loop.on_tick, lambda: None
    trust_another_too(authority, tmp_path)
    assert port._certificates is not None
    port._certificates._files._next_check = 0.0
    with context.wrap_socket(service.socket(over_tcp=True), server_hostname="127.0.0.1") as new:
        client = http2.ClientConnection(new, "here")
        client.ping()
        while client.unanswered_ping:
            client.handle_frame()
        port._event_loop.on_tick = tick
        wait_until(lambda: port._client_ca == authority.path.read_bytes())
        check_answered(ask(client))


def test_who_was_verified_by_former_authorities_makes_no_call_after_its_token_was_refused(
    tls_service: tuple[Service, Authority], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be between the port's two threads at the moment in which the authorities change."""
    monkeypatch.setattr(Http2Connections, "renew", lambda self: None)
    service, authority = tls_service
    port = service.port._strangers
    with alice_of(authority).wrap_socket(service.socket(over_tcp=True), server_hostname="127.0.0.1") as sock:
        client = http2.ClientConnection(sock, "here")
        check_answered(ask(client))
        (connection,) = service.port._connections._all
        trust_another_too(authority, tmp_path)
        wait_until(lambda: port._client_ca == authority.path.read_bytes())
        service.port._event_loop.call_soon(partial(service.port._connections.forget, connection))
        look_between_events(service)
        port.take_back(connection.sock, connection.http, connection.client)
        with pytest.raises((http2.RpcError, ConnectionError)):
            check_answered(ask(client))
    assert service.port.connections == 0
