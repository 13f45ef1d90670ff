"""Connections over TLS, whose records hold 16 KiB."""

from __future__ import annotations

import select
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from tests.security.authority import HOSTS, Authority

from bngrad_wire.http2 import ClientConnection, PeerGoneError, ServerConnection, TlsSocket, set_timeout
from bngrad_wire.http2.sockets import tls

TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    return make_contexts(tmp_path_factory.mktemp("tls"))


def make_contexts(directory: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Returns the context of a server and that of a client that trusts it."""
    authority = Authority(directory)
    own = authority.issue(*HOSTS)
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context(cafile=authority.path)
    server.load_cert_chain(own.certificate, own.key)
    for each in (server, client):
        tls.prepare(each)
    return server, client


@contextmanager
def pair(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> Iterator[tuple[TlsSocket, TlsSocket]]:
    """Two ends, the server's first, over TCP."""
    server, client = contexts
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname(), TIMEOUT_S)
        far, _ = listener.accept()
    far.settimeout(TIMEOUT_S)
    shaken: list[ssl.SSLSocket] = []
    thread = threading.Thread(target=lambda: shaken.append(server.wrap_socket(far, server_side=True)))
    thread.start()
    with client.wrap_socket(near, server_hostname="localhost") as here:
        thread.join()
        with shaken[0] as there:
            assert isinstance(here, TlsSocket)
            assert isinstance(there, TlsSocket)
            yield there, here


@pytest.mark.parametrize("nbytes", [0, 1, 16 * 1024, 16 * 1024 + 1, 100_000, 5_000_000])
def test_messages_come_back_as_they_were(contexts: tuple[ssl.SSLContext, ssl.SSLContext], nbytes: int) -> None:
    sent = bytes(range(256)) * (nbytes // 256 + 1)
    message = memoryview(sent)[:nbytes]

    def echo(there: TlsSocket) -> None:
        with closing(ServerConnection(there)) as server:
            for _ in range(3):
                call = server.accept()
                assert call is not None
                assert call.path == "/a/b"
                received = call.read(call.receive_message() or 0)
                assert call.receive_message() is None
                call.send_message(received[:10], received[10:])
                call.end()

    with pair(contexts) as (there, here):
        thread = threading.Thread(target=echo, args=(there,))
        thread.start()
        with closing(ClientConnection(here, "localhost")) as client:
            for _ in range(3):
                call = client.call("/a/b")
                call.send_message(message, end=True)
                assert call.read(call.receive_message() or 0) == message
                assert call.receive_message() is None
            thread.join()


def test_what_does_not_fit_the_socket_is_sent_later_and_whole(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    answer = bytes(range(256)) * 8192
    with pair(contexts) as (there, here):
        set_timeout(there, TIMEOUT_S)
        with closing(ServerConnection(there)) as server, closing(ClientConnection(here, "localhost")) as client:
            call = client.call("/a/b")
            call.send_message(b"please", end=True)
            asked = server.accept()
            assert asked is not None
            assert asked.read(asked.receive_message() or 0) == b"please"
            server.blocking = False
            for _ in range(4):  # more than the sockets hold, while the client does not read
                asked.send_message(answer)
            assert server.outbound
            asked.send_message(b"the end")
            asked.end()
            heard: list[bytes] = []
            reading = threading.Thread(
                target=lambda: heard.extend(call.read(call.receive_message() or 0) for _ in range(5))
            )
            reading.start()
            while server.outbound:
                select.select([], [there], [], TIMEOUT_S)
                server.flush()
            reading.join()
            assert heard == [answer] * 4 + [b"the end"]


def test_what_has_arrived_is_handled_without_waiting(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    with pair(contexts) as (there, here):
        set_timeout(there, TIMEOUT_S)
        with closing(ServerConnection(there)) as server, closing(ClientConnection(here, "localhost")) as client:
            assert server.accept_nonblocking() is None
            asked = client.call("/a/b")
            asked.send_message(b"x" * 10_000, end=True)
            call = server.accept_nonblocking()
            while call is None:
                select.select([there], [], [], TIMEOUT_S)
                call = server.accept_nonblocking()
            while not call.is_fully_received:
                select.select([there], [], [], TIMEOUT_S)
                server.accept_nonblocking()
            assert call.read(call.receive_message() or 0) == b"x" * 10_000
            call.end()
            assert asked.receive_message() is None


@pytest.mark.parametrize("pieces", [[5, 20_000, 9, 40_000, 3], [9, 16_384] * 4, [1] * 100, [100_000, 0, 7]])
def test_records_are_full_but_the_last(contexts: tuple[ssl.SSLContext, ssl.SSLContext], pieces: list[int]) -> None:
    sent = [bytes([number + 1]) * nbytes for number, nbytes in enumerate(pieces)]
    with pair(contexts) as (there, here):
        for end in (there, here):
            end.set_timeout(TIMEOUT_S)
        assert here.sendmsg(sent) == sum(pieces)
        records: list[bytes] = []
        while sum(map(len, records)) < sum(pieces):
            select.select([there], [], [], TIMEOUT_S)
            records.append(there.read(2**20))
    assert b"".join(records) == b"".join(sent)
    assert [len(each) for each in records[:-1]] == [2**14] * (sum(pieces) // 2**14)


@pytest.mark.parametrize("record_nbytes", [16_384, 16_284, 1_208], ids=["full", "gRPC's", "Go's first"])
@pytest.mark.parametrize("flags", [0, tls.DONT_WAIT])
def test_all_records_that_have_arrived_are_received_at_once_or_all_up_to_a_short_one(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext], flags: int, record_nbytes: int
) -> None:
    message = bytes(range(250)) * 400
    buffer = bytearray(2 * len(message))
    with pair(contexts) as (there, here):
        there.set_timeout(1e9)
        with pytest.raises(BlockingIOError):
            there.recv_into(buffer, 0, tls.DONT_WAIT)
        for start in range(0, len(message), record_nbytes):
            here.sendall(message[start : start + record_nbytes])
        arrived = 0
        while arrived <= len(message):  # records are longer than what they hold
            arrived = len(socket.socket.recv(there, 2**20, socket.MSG_PEEK))
        expected = record_nbytes if record_nbytes < 2**13 and not flags else len(message)
        assert there.recv_into(buffer, 0, flags) == expected
        assert buffer[:expected] == message[:expected]


def test_what_is_left_of_a_record_is_pending(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    with pair(contexts) as (there, here):
        there.set_timeout(TIMEOUT_S)
        here.sendall(bytes(100))
        pending = []
        for nbytes in (10, 20, 70):
            assert there.recv_into(bytearray(nbytes)) == nbytes
            pending.append(there.pending())
        assert pending == [90, 70, 0]


@pytest.mark.parametrize("nbytes", [0, 10, 16_384, 100_000])
def test_the_end_of_a_connection_comes_after_all_that_was_sent(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext], nbytes: int
) -> None:
    received = bytearray()
    with pair(contexts) as (there, here):
        there.set_timeout(TIMEOUT_S)
        here.sendall(b"x" * nbytes)
        here.shutdown(socket.SHUT_WR)
        buffer = bytearray(2 * nbytes + 1)
        while count := there.recv_into(buffer):
            received += buffer[:count]
    assert received == b"x" * nbytes


def send_for_ever(sock: TlsSocket) -> None:
    while True:
        sock.sendmsg([bytes(2**20)])


def test_a_wait_ends_with_the_timeout(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    with pair(contexts) as (there, here):
        for end in (there, here):
            end.set_timeout(0.01)
        with pytest.raises(TimeoutError):
            there.recv_into(bytearray(10))
        with pytest.raises(TimeoutError):  # the other end does not read
            send_for_ever(here)
        assert there.recv_into(bytearray(10)) == 10


def test_a_record_that_comes_byte_by_byte_extends_no_wait(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    has_ended = threading.Event()
    with pair(contexts) as (there, here):
        there.set_timeout(0.2)
        socket.socket.send(here, b"\x17\x03\x03\x40\x00")  # the header of a record of 16 KiB

        def drip() -> None:
            while not has_ended.wait(0.01):
                socket.socket.send(here, b"x")

        with ThreadPoolExecutor(1) as thread:
            dripping = thread.submit(drip)
            try:
                with pytest.raises(TimeoutError):
                    there.recv_into(bytearray(10))
            finally:
                has_ended.set()
            dripping.result()


def test_a_socket_that_another_thread_shut_down_never_sends_in_the_clear(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    with pair(contexts) as (there, here), closing(ServerConnection(there)) as server:
        there.shutdown(socket.SHUT_RDWR)
        with pytest.raises((PeerGoneError, TimeoutError)):
            server.io.send([b"secret"])
        heard = socket.socket.recv(here, 2**16)
        assert b"secret" not in heard
