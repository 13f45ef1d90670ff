"""Calls between this package and h2, an independent implementation of HTTP/2."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, Event, PingAckReceived, StreamEnded, TrailersReceived, WindowUpdated
from h2.settings import SettingCodes, Settings
from tests.unit.wire.http2.peers import in_thread, pair, serve

from bngrad_wire.http2 import ClientConnection, connection_state

REQUEST = [
    (":method", "POST"),
    (":scheme", "http"),
    (":authority", "localhost"),
    (":path", "/a/b"),
    ("content-type", "application/grpc"),
]
RESPONSE = [(":status", "200"), ("content-type", "application/grpc")]


class Peer:
    """One end of a connection, made with h2."""

    def __init__(self, sock: socket.socket, client: bool, window: int = 65_535) -> None:
        self.sock = sock
        self.h2 = H2Connection(H2Configuration(client_side=client, header_encoding="utf-8"))
        self.h2.local_settings = Settings(client, {SettingCodes.INITIAL_WINDOW_SIZE: window})
        self.h2.initiate_connection()
        self.flush()

    def flush(self) -> None:
        self.sock.sendall(self.h2.data_to_send())

    def receive(self, *until: type[Event]) -> list[Event]:
        """Returns the events up to one of the given kinds; acknowledges the data."""
        events: list[Event] = []
        while not any(isinstance(event, until) for event in events):
            data = self.sock.recv(65536)
            assert data, "the connection ended"
            for event in self.h2.receive_data(data):
                events.append(event)
                if isinstance(event, DataReceived) and event.flow_controlled_length:
                    self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            self.flush()
        return events


@contextmanager
def client_peer(window: int = 65_535) -> Iterator[Peer]:
    near, far = pair("unix")
    with in_thread(serve, far), near:
        yield Peer(near, client=True, window=window)
        near.shutdown(socket.SHUT_WR)


def data_of(events: list[Event]) -> bytes:
    return b"".join(event.data or b"" for event in events if isinstance(event, DataReceived))


def test_padding_single_bytes_and_pings_between_them_make_no_difference() -> None:
    message = b"\0\0\0\0\x28" + bytes(range(40))
    with client_peer() as peer:
        for stream_id in (1, 3):
            peer.h2.send_headers(stream_id, REQUEST, priority_weight=7)
            for position, byte in enumerate(message):
                peer.h2.send_data(stream_id, bytes([byte]), pad_length=position * 3 if position % 2 else None)
                peer.h2.ping(b"12345678")
            peer.h2.end_stream(stream_id)
            peer.flush()
            events = peer.receive(StreamEnded)
            assert data_of(events) == message
            assert sum(isinstance(event, PingAckReceived) for event in events) == len(message)


def test_header_blocks_that_use_the_dynamic_table_are_understood_call_after_call() -> None:
    with client_peer() as peer:
        for stream_id in range(1, 41, 2):
            headers = [*REQUEST, ("x-new", str(stream_id % 6)), ("grpc-timeout", "1S")]
            peer.h2.send_headers(stream_id, headers)
            peer.h2.send_data(stream_id, b"\0\0\0\0\0", end_stream=True)
            peer.flush()
            events = peer.receive(StreamEnded)
            trailers = next(event for event in events if isinstance(event, TrailersReceived))
            assert ("grpc-status", "0") in [(str(name), str(value)) for name, value in trailers.headers or []]


def test_the_server_waits_for_a_small_window_and_buffers_what_arrives_meanwhile() -> None:
    first, second = os.urandom(30_000), os.urandom(10)
    with client_peer(window=1000) as peer:
        peer.h2.send_headers(1, REQUEST)
        peer.flush()
        whole = b"\0\0\0\x75\x30" + first + b"\0\0\0\0\x0a" + second
        for start in range(0, len(whole), 10_000):
            peer.h2.send_data(1, whole[start : start + 10_000])
        peer.h2.end_stream(1)
        peer.flush()
        assert data_of(peer.receive(StreamEnded)) == whole


def test_a_window_that_shrinks_below_zero_is_waited_for() -> None:
    message = b"\0\0\0\x75\x30" + os.urandom(30_000)
    with client_peer(window=20_000) as peer:
        peer.h2.send_headers(1, REQUEST)
        peer.flush()
        peer.h2.send_data(1, message[:16_000])
        peer.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 100})
        peer.h2.send_data(1, message[16_000:], end_stream=True)
        peer.flush()
        assert data_of(peer.receive(StreamEnded)) == message


def test_windows_of_the_call_and_the_connection_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_state, "WINDOW_UPDATE_NBYTES", 5000)
    with client_peer() as peer:
        peer.h2.send_headers(1, REQUEST)
        peer.h2.send_data(1, b"\0\0\0\x27\x10")
        peer.h2.send_data(1, bytes(10_000), pad_length=200)
        peer.flush()
        events = peer.receive(DataReceived)
        peer.h2.end_stream(1)
        peer.flush()
        events += peer.receive(StreamEnded)
    updates = [event for event in events if isinstance(event, WindowUpdated)]
    for stream_id in (0, 1):
        deltas = [event.delta or 0 for event in updates if event.stream_id == stream_id and (event.delta or 0) < 2**30]
        assert 5000 <= sum(deltas) <= 10_206


def test_the_client_calls_a_server_with_small_windows_and_no_header_table() -> None:
    message = os.urandom(200_000)
    near, far = pair("unix")

    def answer() -> None:
        with far:
            peer = Peer(far, client=False)
            peer.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 3000, SettingCodes.HEADER_TABLE_SIZE: 0})
            peer.flush()
            for stream_id in (1, 3):
                received = data_of(peer.receive(StreamEnded))
                peer.h2.send_headers(stream_id, RESPONSE)
                for start in range(0, len(received), 10_000):
                    peer.h2.send_data(stream_id, received[start : start + 10_000], pad_length=start % 256)
                peer.h2.send_headers(stream_id, [("grpc-status", "0")], end_stream=True)
                peer.flush()

    with in_thread(answer), closing(ClientConnection(near, "localhost")) as connection:
        for _ in range(2):
            call = connection.call("/a/b")
            call.send_message(message, end=True)
            assert call.receive_message() == len(message)
            assert call.read(len(message)) == message
            assert call.receive_message() is None
