"""A client made with h2, as grpclib's is, with TLS and without."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from tests.raw_http2 import path_of, prefixed, request
from tests.security.conftest import Guarded

from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_wire.http2.frames import DEFAULT_WINDOW

TIMEOUT_S = 60.0
SMALL = prefixed(request(4096).SerializeToString())
LARGE_METADATA = [(f"x-large-{number}", "y" * 1000) for number in range(60)]
"""One value of this size would take the client so long to encode that, on a busy machine, the server closes on it."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with Guarded(tmp_path_factory.mktemp("pure"), client_ca=False).running() as guarded:
        yield guarded


class PureClient(AbstractContextManager["PureClient"]):
    """Makes one call after the other; its windows have 64 KiB, and are opened for each frame.

    Attributes:
        sock: Its socket.
        details: What the server said of the last call that it refused.
    """

    details = ""

    def __init__(self, guarded: Guarded, listener: str) -> None:
        if listener == "local":
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.settimeout(TIMEOUT_S)
            self.sock.connect(f"{guarded.endpoints.local_directory}/calls")
        else:
            plain = socket.create_connection(guarded.port, TIMEOUT_S)
            context = ssl.create_default_context(cafile=guarded.authority.path)
            context.set_alpn_protocols(["h2"])
            self.sock = context.wrap_socket(plain, server_hostname="localhost")
        self._h2 = H2Connection(H2Configuration(header_encoding="utf-8"))
        self._h2.initiate_connection()
        self._token = guarded.token
        self.flush()
        while self._h2.outbound_flow_control_window == DEFAULT_WINDOW:
            self._h2.receive_data(self.sock.recv(2**16))  # the server's windows
        self.flush()

    def __exit__(self, *error: object) -> None:
        self.sock.close()

    def flush(self) -> None:
        self.sock.sendall(self._h2.data_to_send())

    def begin(self, message: bytes, *metadata: tuple[str, str], end: bool = True) -> int:
        """Begins a call; a small message is sent with what comes next, such as its cancellation."""
        stream_id = self._h2.get_next_available_stream_id()
        pseudo = [(":method", "POST"), (":scheme", "http"), (":path", path_of("FusedBatchNormGradV2"))]
        common = [(":authority", "localhost"), ("content-type", "application/grpc"), ("te", "trailers")]
        self._h2.send_headers(stream_id, [*pseudo, *common, ("authorization", f"Bearer {self._token}"), *metadata])
        for start in range(0, len(message), 2**14):
            self._h2.send_data(stream_id, message[start : start + 2**14])
            if len(message) > 2**14:
                self.flush()
        if end:
            self._h2.end_stream(stream_id)
        return stream_id

    def cancel(self, stream_id: int) -> None:
        self._h2.reset_stream(stream_id, ErrorCodes.CANCEL)
        self.flush()

    def ping(self) -> None:
        self._h2.ping(b"12345678")
        self.flush()

    def finish(self) -> tuple[str, bytes]:
        """Returns status and message of the running call; no status if the server resets it."""
        self.flush()
        status, message = "", bytearray()
        while True:
            data = self.sock.recv(2**16)
            assert data, "the server closed the connection"
            events: list[Event] = self._h2.receive_data(data)
            for event in events:
                assert not isinstance(event, ConnectionTerminated), event
                if isinstance(event, DataReceived):
                    message += event.data or b""
                    self._h2.acknowledge_received_data(event.flow_controlled_length or 0, event.stream_id or 0)
                elif isinstance(event, (ResponseReceived, TrailersReceived)):
                    headers = {str(name): str(value) for name, value in event.headers or []}
                    status, self.details = headers.get("grpc-status", ""), headers.get("grpc-message", self.details)
            self.flush()
            if any(isinstance(event, (StreamEnded, StreamReset)) for event in events):
                return status, bytes(message)

    def ask(self, message: bytes = SMALL, *metadata: tuple[str, str]) -> str:
        self.begin(message, *metadata)
        return self.finish()[0]


@pytest.fixture(params=["TCP", "local"])
def client(request: pytest.FixtureRequest, server: Guarded) -> Iterator[PureClient]:
    with PureClient(server, request.param) as client:
        yield client


def test_quick_cancels_do_not_cost_the_connection(client: PureClient) -> None:
    assert client.ask() == "0"
    for number in range(50):
        client.cancel(client.begin(SMALL, end=number % 2 == 0))
    assert client.ask() == "0"


def test_too_much_metadata_is_refused_on_its_call(client: PureClient) -> None:
    for _ in range(3):
        assert client.ask(SMALL, *LARGE_METADATA) == "8"
        assert client.ask(SMALL, ("x-small", "y")) == "0"


@pytest.mark.parametrize("message", [SMALL[:3], SMALL[:-1], b"\7" + SMALL[1:]])
def test_a_message_that_is_no_message_ends_its_call(client: PureClient, message: bytes) -> None:
    for _ in range(3):
        assert client.ask(message) == "13"
        assert client.ask() == "0"


def test_many_calls_with_pings_between_them_are_answered(client: PureClient) -> None:
    for _ in range(300):
        client.ping()
        assert client.ask() == "0"
        client.ping()


def test_a_large_response_comes_through_small_windows(client: PureClient) -> None:
    """Each of its frames costs two window updates."""
    nbytes = 2**24
    client.begin(prefixed(request(nbytes).SerializeToString()))
    status, message = client.finish()
    assert status == "0"
    assert len(pb.FusedBatchNormGradV2Response.FromString(message[5:]).x_backprop.data) == nbytes
