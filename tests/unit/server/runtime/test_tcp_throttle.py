"""Connections that send more than their calls explain are paused, by real sockets."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import select
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from bngrad_server.runtime import tcp_throttle, traffic_accounts
from bngrad_server.runtime.tcp_throttle import TcpThrottle
from bngrad_server.runtime.traffic_accounts import Account

MIB = 2**20
MAX_MESSAGE_NBYTES = 8 * MIB
CLIENT = "a client"


class Flooder:
    """A connection of which one end sends as much as the other takes."""

    def __init__(self, listener: socket.socket) -> None:
        self.sock = socket.create_connection(listener.getsockname())
        self.accepted, address = listener.accept()
        self.name = f"ipv4:{address[0]}:{address[1]}"
        self.received = 0
        threading.Thread(target=self._receive, daemon=True).start()

    def send_all(self, nbytes: int) -> None:
        """Sends, and waits until everything was received."""
        expected = self.received + nbytes
        self.begin_to_send(nbytes)
        self.wait_for(expected)

    def is_paused(self) -> bool:
        """Sends a megabyte, and returns whether nothing of it is received within half a second."""
        before = self.received
        self.begin_to_send(MIB)
        time.sleep(0.5)
        return self.received == before

    def wait_for(self, nbytes: int) -> None:
        """Waits until this many bytes were received in all; the system may have to send them again."""
        deadline = time.monotonic() + 20
        while self.received < nbytes and time.monotonic() < deadline:
            time.sleep(0.01)
        assert self.received == nbytes

    def close(self) -> None:
        self.sock.close()
        self.accepted.close()

    def begin_to_send(self, nbytes: int) -> None:
        threading.Thread(target=self._send, args=(nbytes,), daemon=True).start()

    def _send(self, nbytes: int) -> None:
        with contextlib.suppress(OSError):
            self.sock.sendall(bytes(nbytes))

    def _receive(self) -> None:
        with contextlib.suppress(OSError):
            while piece := self.accepted.recv(2**16):
                self.received += len(piece)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture
def throttle(listener: socket.socket) -> TcpThrottle:
    throttle = TcpThrottle(MAX_MESSAGE_NBYTES)
    throttle.ports.add(listener.getsockname()[1])
    return throttle


@pytest.fixture
def flooder(listener: socket.socket) -> Iterator[Flooder]:
    with contextlib.closing(Flooder(listener)) as flooder:
        yield flooder


def test_a_stranger_that_floods_is_paused(throttle: TcpThrottle, flooder: Flooder) -> None:
    flooder.send_all(5 * MIB)
    throttle.look()
    assert flooder.is_paused()


def test_a_paused_connection_does_not_block_the_threads_that_read_it(throttle: TcpThrottle, flooder: Flooder) -> None:
    flooder.accepted.settimeout(60)  # its descriptor does not block, like those of grpcio
    assert not os.get_blocking(flooder.accepted.fileno())
    flooder.send_all(5 * MIB)
    throttle.look()
    assert flooder.is_paused()
    assert not os.get_blocking(flooder.accepted.fileno())


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses end with the next look."""
    monkeypatch.setattr(tcp_throttle, "_PAUSE_S", 0.0)


@pytest.mark.usefixtures("short_pauses")
def test_the_pause_of_a_connection_with_ops_ends(throttle: TcpThrottle, flooder: Flooder) -> None:
    flooder.send_all(5 * MIB)
    throttle.look()
    assert flooder.is_paused()
    throttle.peer(flooder.name).op(CLIENT)
    throttle.look()
    flooder.wait_for(6 * MIB)


@pytest.mark.usefixtures("short_pauses")
def test_the_pause_of_a_stranger_ends_that_was_paused_for_others(
    throttle: TcpThrottle, listener: socket.socket, flooder: Flooder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(Flooder(listener)) as other:
        throttle.look()
        flooder.send_all(5 * MIB)
        other.send_all(MIB)
        monkeypatch.setattr(tcp_throttle, "_STRANGER_RATE", float("inf"))
        throttle.look()
        assert other.is_paused()
        throttle.look()
        other.wait_for(2 * MIB)


@pytest.mark.usefixtures("short_pauses")
def test_a_stranger_that_floods_is_shut_down_after_its_pause(throttle: TcpThrottle, flooder: Flooder) -> None:
    flooder.send_all(5 * MIB)
    throttle.look()
    assert flooder.is_paused()
    throttle.look()
    assert flooder.accepted.recv(1) == b""
    assert flooder.is_paused()
    assert flooder.received == 5 * MIB


@pytest.mark.usefixtures("short_pauses")
def test_a_stranger_of_which_little_was_taken_is_shut_down_too(
    throttle: TcpThrottle, listener: socket.socket, flooder: Flooder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(Flooder(listener)) as other:
        throttle.look()
        flooder.send_all(5 * MIB)
        other.send_all(96 * 1024)
        throttle.look()
        assert other.is_paused()
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + 5)
        throttle.look()
        assert other.accepted.recv(1) == b""


@pytest.mark.usefixtures("short_pauses")
def test_strangers_are_shut_down_a_few_at_a_time(
    throttle: TcpThrottle, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_throttle, "_SHUT_DOWNS", 2)
    with contextlib.ExitStack() as stack:
        flooders = [stack.enter_context(contextlib.closing(Flooder(listener))) for _ in range(3)]
        for flooder in flooders:
            flooder.send_all(5 * MIB)
        throttle.look()
        throttle.look()
        assert len(select.select([flooder.accepted for flooder in flooders], [], [], 0)[0]) == 2
        throttle.look()
        assert len(select.select([flooder.accepted for flooder in flooders], [], [], 0)[0]) == 3


def test_a_descriptor_that_is_used_again_is_another_connection(throttle: TcpThrottle, listener: socket.socket) -> None:
    with contextlib.closing(Flooder(listener)) as first:
        fd = first.accepted.fileno()
        throttle.look()
    with contextlib.closing(Flooder(listener)) as second:
        assert second.accepted.fileno() == fd
        second.send_all(5 * MIB)
        throttle.look()
        assert second.is_paused()


def test_the_strangers_of_a_host_have_one_budget(throttle: TcpThrottle, listener: socket.socket) -> None:
    with contextlib.ExitStack() as stack:
        flooders = [stack.enter_context(contextlib.closing(Flooder(listener))) for _ in range(3)]
        for flooder in flooders:
            flooder.send_all(2 * MIB)
        throttle.look()
        assert any(flooder.is_paused() for flooder in flooders)
        newcomer = stack.enter_context(contextlib.closing(Flooder(listener)))
        newcomer.send_all(2**14)
        throttle.look()
        newcomer.send_all(2**14)


def test_who_sends_messages_of_ops_is_not_paused(throttle: TcpThrottle, flooder: Flooder) -> None:
    peer = throttle.peer(flooder.name)
    for _ in range(20):
        with peer.op(CLIENT) as op:
            op.begin_to_receive()
            flooder.send_all(4 * MIB)
            throttle.look()
            op.received(4 * MIB)
    flooder.send_all(MIB)


def test_a_message_that_follows_another_is_not_taken_for_a_flood(listener: socket.socket, flooder: Flooder) -> None:
    throttle = TcpThrottle(48 * MIB)
    throttle.ports.add(listener.getsockname()[1])
    peer = throttle.peer(flooder.name)
    for _ in range(3):
        with peer.op(CLIENT) as op:
            op.begin_to_receive()
            flooder.send_all(20 * MIB)
            throttle.look()
            flooder.send_all(20 * MIB)
            op.received(40 * MIB)
        flooder.send_all(MIB)
        throttle.look()
        flooder.send_all(MIB)


def test_ops_do_not_excuse_a_flood(throttle: TcpThrottle, flooder: Flooder) -> None:
    with throttle.peer(flooder.name).op(CLIENT) as op:
        op.begin_to_receive()
        flooder.send_all(32 * MIB)
        throttle.look()
        assert flooder.is_paused()


def test_ops_that_wait_excuse_only_the_beginnings_of_their_messages(throttle: TcpThrottle, flooder: Flooder) -> None:
    peer = throttle.peer(flooder.name)
    with contextlib.ExitStack() as stack:
        for _ in range(16):
            stack.enter_context(peer.op(CLIENT))
        flooder.send_all(16 * MIB)
        throttle.look()
        flooder.send_all(MIB)
        flooder.send_all(MIB)
        throttle.look()
        assert flooder.is_paused()


def test_messages_of_futile_ops_explain_nothing(throttle: TcpThrottle, flooder: Flooder) -> None:
    peer = throttle.peer(flooder.name)
    for _ in range(5):
        with peer.op(CLIENT) as op:
            op.begin_to_receive()
            flooder.send_all(4 * MIB)
            op.received(4 * MIB)
            op.was_futile()
    throttle.look()
    assert flooder.is_paused()


def test_many_small_futile_ops_are_a_flood(throttle: TcpThrottle, flooder: Flooder) -> None:
    peer = throttle.peer(flooder.name)
    flooder.send_all(1)
    throttle.look()
    for _ in range(3000):
        peer.op(CLIENT).was_futile()
    throttle.look()
    assert flooder.is_paused()


def test_an_op_that_is_answered_excuses_one_that_is_cancelled(throttle: TcpThrottle, flooder: Flooder) -> None:
    peer = throttle.peer(flooder.name)
    for _ in range(10_000):
        peer.op(CLIENT).answered()
        peer.op(CLIENT).was_futile()
    flooder.send_all(MIB)
    throttle.look()
    flooder.send_all(MIB)


def test_calls_that_the_server_refuses_are_no_flood(throttle: TcpThrottle, flooder: Flooder) -> None:
    peer = throttle.peer(flooder.name)
    for _ in range(20):
        flooder.send_all(MIB)
        for _ in range(16):
            peer.op(CLIENT).was_refused()
    throttle.look()
    flooder.send_all(MIB)


def test_the_connections_of_a_client_have_one_account(throttle: TcpThrottle, listener: socket.socket) -> None:
    with contextlib.ExitStack() as stack:
        first, second, third, other = (stack.enter_context(contextlib.closing(Flooder(listener))) for _ in range(4))
        for flooder in (first, second, third):
            throttle.peer(flooder.name).op(CLIENT)
            flooder.send_all(6 * MIB)
        throttle.peer(other.name).op("another client")
        other.send_all(6 * MIB)
        throttle.look()
        assert first.is_paused()
        other.send_all(2**14)


def test_a_client_is_paused_again_on_a_new_connection(throttle: TcpThrottle, listener: socket.socket) -> None:
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(contextlib.closing(Flooder(listener))) for _ in range(2))
        throttle.peer(first.name).op(CLIENT)
        first.send_all(17 * MIB)
        throttle.look()
        first.close()
        with throttle.peer(second.name).op(CLIENT) as op:
            op.begin_to_receive()
            second.send_all(3 * MIB)
            throttle.look()
            assert second.is_paused()


def test_a_client_that_only_costs_time_is_paused_on_each_connection_for_a_while(
    throttle: TcpThrottle, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic_accounts, "_PAUSE_S", 3.0)
    with contextlib.ExitStack() as stack:
        first, second, other = (stack.enter_context(contextlib.closing(Flooder(listener))) for _ in range(3))
        throttle.peer(other.name).op("another client")
        throttle.refused(first.name, CLIENT)
        throttle.look()
        throttle.peer(second.name).op(CLIENT)
        throttle.look()
        assert first.is_paused()
        assert second.is_paused()
        other.send_all(2**14)
        time.sleep(3)
        throttle.look()
        second.wait_for(MIB)


def test_a_look_follows_a_refusal_at_once(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_throttle, "_INTERVAL_S", 600.0)
    monkeypatch.setattr(traffic_accounts, "_PAUSE_S", 600.0)
    throttle = TcpThrottle(MAX_MESSAGE_NBYTES)
    throttle.ports.add(listener.getsockname()[1])
    throttle.start()
    with contextlib.closing(Flooder(listener)) as flooder, contextlib.closing(throttle):
        throttle.refused(flooder.name, CLIENT)
        deadline = time.monotonic() + 20
        while not flooder.is_paused():
            assert time.monotonic() < deadline


@contextlib.contextmanager
def no_descriptors_left() -> Iterator[None]:
    """Lets this process open none, while it keeps those that it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_look_without_descriptors_changes_nothing(
    throttle: TcpThrottle, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_throttle, "_STRANGER_RATE", float("inf"))
    monkeypatch.setattr(tcp_throttle, "_PAUSE_S", 0.0)
    with contextlib.ExitStack() as stack:
        stranger, client = (stack.enter_context(contextlib.closing(Flooder(listener))) for _ in range(2))
        stranger.send_all(5 * MIB)
        throttle.look()
        assert stranger.is_paused()
        throttle.refused(client.name, CLIENT)
        with no_descriptors_left(), pytest.raises(OSError, match="Too many open files"):
            throttle.look()
        throttle.look()
        stranger.wait_for(6 * MIB)
        assert client.is_paused()


def test_the_thread_outlives_a_lack_of_descriptors_and_says_so_once(
    throttle: TcpThrottle, flooder: Flooder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tcp_throttle, "_INTERVAL_S", 0.01)
    with contextlib.closing(throttle):
        with no_descriptors_left():
            throttle.start()
            time.sleep(0.5)  # for several looks
        flooder.begin_to_send(5 * MIB)  # it may be paused before the last of it
        deadline = time.monotonic() + 20
        while not flooder.is_paused():
            assert time.monotonic() < deadline
    assert [each.levelno for each in caplog.records].count(logging.ERROR) == 1


@pytest.mark.usefixtures("short_pauses", "flooder")
def test_the_thread_outlives_a_look_that_failed_and_pauses_end_as_well(
    throttle: TcpThrottle, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_throttle, "_INTERVAL_S", 0.01)
    errors, look_at = iter([KeyError()]), throttle._look_at

    def fail_once(*arguments: Any) -> None:
        for error in errors:
            raise error
        look_at(*arguments)

    with contextlib.closing(Flooder(listener)) as paused, contextlib.closing(throttle):
        paused.send_all(5 * MIB)
        throttle.look()
        assert paused.is_paused()
        throttle.peer(paused.name).op(CLIENT)
        monkeypatch.setattr(throttle, "_look_at", fail_once)  # for the connection before it
        throttle.start()
        paused.wait_for(6 * MIB)


def test_all_pauses_end_when_the_server_does(
    throttle: TcpThrottle, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (tcp_throttle, traffic_accounts):
        monkeypatch.setattr(module, "_PAUSE_S", 600.0)
    with contextlib.ExitStack() as stack:
        stranger, client = (stack.enter_context(contextlib.closing(Flooder(listener))) for _ in range(2))
        stranger.send_all(5 * MIB)
        throttle.refused(client.name, CLIENT)
        throttle.look()
        assert stranger.is_paused()
        assert client.is_paused()
        throttle.start()
        throttle.close()
        stranger.wait_for(6 * MIB)
        client.wait_for(MIB)


def test_connections_of_clients_that_are_not_authenticated_have_an_account_each(
    throttle: TcpThrottle, listener: socket.socket
) -> None:
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(contextlib.closing(Flooder(listener))) for _ in range(2))
        for flooder in (first, second):
            throttle.peer(flooder.name).op(None)
            flooder.send_all(10 * MIB)
        throttle.look()
        first.send_all(2**14)


def test_each_pause_is_longer_than_the_one_before() -> None:
    account = Account(0.0)
    assert [account.strike(now) for now in (0.0, 1.0, 2.0)] == [0.5, 1.0, 2.0]
    assert account.strike(100.0) == 0.5


def test_connections_to_other_ports_are_left_alone(flooder: Flooder) -> None:
    throttle = TcpThrottle(MAX_MESSAGE_NBYTES)
    flooder.send_all(5 * MIB)
    throttle.look()
    flooder.send_all(MIB)


def test_a_flood_of_which_the_system_tells_little_is_let_alone(
    throttle: TcpThrottle, flooder: Flooder, monkeypatch: pytest.MonkeyPatch
) -> None:
    getsockopt = socket.socket.getsockopt

    def emulated(sock: socket.socket, level: int, option: int, *size: int) -> int | bytes:
        is_info = (level, option) == (socket.IPPROTO_TCP, socket.TCP_INFO)
        return bytes(4) if is_info else getsockopt(sock, level, option, *size)

    monkeypatch.setattr(socket.socket, "getsockopt", emulated, raising=False)
    flooder.send_all(5 * MIB)
    throttle.look()
    assert not flooder.is_paused()


def test_connections_that_have_ended_are_forgotten(
    throttle: TcpThrottle, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    def known() -> list[int]:
        return [len(each) for each in (throttle._connections, throttle._peers, throttle._accounts, throttle._strangers)]

    with contextlib.closing(Flooder(listener)) as calling, contextlib.closing(Flooder(listener)) as stranger:
        throttle.peer(calling.name).op(None)
        stranger.send_all(2**17)
        throttle.look()
        assert known() == [2, 2, 1, 1]
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 60)
    throttle.look()
    assert known() == [0, 0, 0, 0]


def test_a_peer_is_remembered_while_an_op_of_it_runs_although_its_connection_was_not_seen(
    throttle: TcpThrottle,
) -> None:
    name = "ipv4:192.0.2.1:1"
    peer = throttle.peer(name)
    with peer.op(None) as op:
        throttle.look()
        op.begin_to_receive()
        throttle.look()
        assert throttle.peer(name) is peer
    throttle.look()
    assert throttle.peer(name) is not peer


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_a_connection_has_the_name_that_grpcio_gives_its_peer(host: str) -> None:
    handler: Any = grpc.unary_unary_rpc_method_handler(lambda request, context: context.peer().encode())
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", {"Name": handler}),))
    throttle, port = TcpThrottle(MAX_MESSAGE_NBYTES), server.add_insecure_port("[::]:0")
    throttle.ports.add(port)
    server.start()
    with grpc.insecure_channel(f"{host}:{port}") as channel:
        ask: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/test/Name")
        name = ask(b"", timeout=20).decode()
        throttle.look()
        assert {connection.name for connection in throttle._connections.values()} == {name}
    server.stop(0).wait()


def test_of_floods_that_follow_each_other_one_is_logged(
    throttle: TcpThrottle, listener: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            flooder = stack.enter_context(contextlib.closing(Flooder(listener)))
            flooder.send_all(5 * MIB)
            throttle.look()
            assert flooder.is_paused()
    assert len(caplog.records) == 1
    assert caplog.records[0].getMessage().endswith(": it sends far more than its calls explain")
