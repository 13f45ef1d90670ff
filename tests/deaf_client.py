"""A client that makes calls and reads no answers, for what no client library does."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import Event, RemoteSettingsChanged, ResponseReceived, StreamReset, TrailersReceived
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings
from tests.servers import wait_until

_TIMEOUT_S = 60.0
_FRAME_NBYTES = 2**14


class DeafClient(AbstractContextManager["DeafClient"]):
    """Makes unary calls on one connection, and gives the server no window for their answers.

    Attributes:
        answered: The streams of calls whose answers, or statuses, have begun.
        ended: How calls ended, by stream: the status, or "reset".
    """

    def __init__(self, sock: socket.socket, metadata: Sequence[tuple[str, str]] = ()) -> None:
        self.answered: set[int] = set()
        self.ended: dict[int, str] = {}
        self._sock = sock
        self._has_settings = False
        self._h2 = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self._h2.local_settings = Settings(True, {SettingCodes.INITIAL_WINDOW_SIZE: 0})
        self._h2.initiate_connection()
        self._metadata = metadata
        self._rest: dict[int, memoryview] = {}
        self._unending: set[int] = set()
        self._mutex = threading.Lock()
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(_TIMEOUT_S)
        self._sock.close()

    def call(self, path: str, data: bytes, *, end: bool = True) -> int:
        """Begins a call once it may, sends all of its data as the server takes it, and returns its stream."""
        wait_until(self._may_call)
        pseudo = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost")]
        with self._mutex:
            stream = self._h2.get_next_available_stream_id()
            self._h2.send_headers(
                stream, [*pseudo, ("content-type", "application/grpc"), ("te", "trailers"), *self._metadata]
            )
            self._rest[stream] = memoryview(data)
            if not end:
                self._unending.add(stream)
            self._send()
        return stream

    def _may_call(self) -> bool:
        return self._has_settings and self._h2.open_outbound_streams < self._h2.remote_settings.max_concurrent_streams

    def reset(self, stream: int) -> None:
        with self._mutex:
            self._rest.pop(stream, None)
            self._h2.reset_stream(stream)
            self._send()

    def _receive(self) -> None:
        with suppress(OSError, ProtocolError):  # h2 takes nothing after GOAWAY
            while data := self._sock.recv(2**16):
                with self._mutex:
                    for event in self._h2.receive_data(data):
                        self._note(event)
                    self._send()

    def _note(self, event: Event) -> None:
        if isinstance(event, RemoteSettingsChanged):
            self._has_settings = True
        elif isinstance(event, StreamReset):
            self._rest.pop(event.stream_id, None)
            self.ended.setdefault(event.stream_id, "reset")
        elif isinstance(event, (ResponseReceived, TrailersReceived)):
            self.answered.add(event.stream_id)
            status = dict[object, object](event.headers).get("grpc-status")
            if status is not None:
                self._rest.pop(event.stream_id, None)
                self.ended[event.stream_id] = str(status)

    def _send(self) -> None:
        for stream in list(self._rest):
            with suppress(ProtocolError):  # the server may have ended the call
                self._send_rest(stream)
        with suppress(OSError):
            self._sock.sendall(self._h2.data_to_send())

    def _send_rest(self, stream: int) -> None:
        rest = self._rest[stream]
        while rest and (n := min(self._h2.local_flow_control_window(stream), _FRAME_NBYTES, len(rest))) > 0:
            self._h2.send_data(stream, rest[:n].tobytes())
            rest = rest[n:]
        self._rest[stream] = rest
        if not rest:
            del self._rest[stream]
            if stream not in self._unending:
                self._h2.end_stream(stream)
