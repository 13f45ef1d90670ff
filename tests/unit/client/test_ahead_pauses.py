"""When tensors are sent ahead: what a failure, a full server, another server and the end of the client mean for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from tests.clock import Clock
from tests.servers import wait_until
from tests.unit.client.endpoints import endpoint, full_listener, message_of

from bngrad._deadline import ENDLESS, Cancellation
from bngrad._errors import BngradError
from bngrad._transports import ahead as ahead_module
from bngrad._transports.ahead import AheadConnection
from bngrad._transports.connection_pool import NoConnectionYetError, NotConnectedError
from bngrad._transports.http2 import Http2Transport
from bngrad.typing import Array
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_wire.http2 import RpcError, ServerCall

X = np.ones((256, 256), np.float32)
RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL = 8, 12, 13


class Server:
    """Takes tensors, whose tickets are the numbers of the calls; or fails with a status.

    Attributes:
        came: What came with each call: the tensor's shape, what to forget, and how many messages there were.
    """

    def __init__(self) -> None:
        self.code = 0
        self.came: list[tuple[list[int], list[bytes], int]] = []
        self.calls: Http2Transport

    def answer(self, call: ServerCall) -> None:
        messages = list(iter(lambda: message_of(call), None))
        first = pb.SendAheadRequest.FromString(messages[0])
        self.came.append((list(first.tensor.shape), list(first.forget), len(messages)))
        if self.code:
            raise RpcError(self.code, "for a test")
        call.send_message(pb.SendAheadResponse(ticket=b"%d" % len(self.came)).SerializeToString(), more=True)
        call.end()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    with endpoint(made.answer) as peer, closing(Http2Transport(peer.address, "a server")) as made.calls:
        yield made


@pytest.fixture
def ahead() -> Iterator[AheadConnection]:
    with closing(AheadConnection()) as made:
        yield made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(ahead_module, "time", clock)
    return clock


def send(ahead: AheadConnection, calls: Http2Transport, *forget: bytes, x: Array = X, key: bytes = b"") -> bytes:
    return ahead.send(calls, x, forget, ENDLESS, Cancellation(), (key, 0) if key else None)


def test_large_tensors_are_sent_and_those_in_shared_memory_are_told(server: Server, ahead: AheadConnection) -> None:
    assert send(ahead, server.calls, x=X[:255]) == b""
    ahead.forget([b"9"], ENDLESS, Cancellation())  # to a server that was sent none
    assert not server.came
    assert (send(ahead, server.calls), send(ahead, server.calls, key=b"region")) == (b"1", b"2")
    ahead.forget([b"1"], ENDLESS, Cancellation())
    assert server.came == [([256, 256], [], 2), ([256, 256], [], 1), ([], [b"1"], 1)]


@pytest.mark.parametrize(
    ("code", "pause_s", "is_over_by_forgetting"),
    [(INTERNAL, 1, False), (RESOURCE_EXHAUSTED, 1, True), (UNIMPLEMENTED, 300, False)],
)
def test_after_a_failure_there_is_a_pause_which_a_full_server_ends_by_forgetting(
    server: Server, ahead: AheadConnection, clock: Clock, code: int, pause_s: float, is_over_by_forgetting: bool
) -> None:
    def fail() -> None:
        server.code = code
        with pytest.raises(BngradError):
            send(ahead, server.calls)
        server.code = 0
        server.came.clear()

    fail()
    clock.now += pause_s - 0.5
    assert send(ahead, server.calls) == b""
    assert not server.came
    clock.now += 0.5
    assert send(ahead, server.calls) == b"1"
    fail()
    send(ahead, server.calls, b"9")
    assert server.came == [([256, 256], [b"9"], 2) if is_over_by_forgetting else ([], [b"9"], 1)]


def test_a_server_that_cannot_be_reached_is_tried_again_after_a_second(
    ahead: AheadConnection, clock: Clock, tmp_path: Path
) -> None:
    nowhere = Http2Transport(f"{tmp_path}/socket", "it")
    for _ in range(2):
        with pytest.raises(NotConnectedError):
            send(ahead, nowhere)
        assert send(ahead, nowhere) == b""
        clock.now += 1.0


def test_a_connection_that_is_not_there_yet_makes_no_pause(
    server: Server, ahead: AheadConnection, clock: Clock, tmp_path: Path
) -> None:
    with full_listener(f"{tmp_path}/socket") as full, pytest.raises(NoConnectionYetError):
        send(ahead, Http2Transport(full.getsockname(), "it"))
    assert send(ahead, server.calls) == b"1"


def test_another_server_has_a_connection_of_its_own_and_the_last_one_ends(
    server: Server, ahead: AheadConnection
) -> None:
    """A server forgets with the connection."""
    other = Server()
    with endpoint(other.answer) as peer, closing(Http2Transport(peer.address, "another")) as calls:
        assert (send(ahead, calls), send(ahead, server.calls)) == (b"1", b"1")
        wait_until(lambda: peer._sockets[0].fileno() < 0)
        assert (len(other.came), len(server.came), peer.connections) == (1, 1, 1)


def test_closing_ends_the_connection_and_nothing_is_sent_any_longer(server: Server, ahead: AheadConnection) -> None:
    with endpoint(server.answer) as peer, closing(Http2Transport(peer.address, "a server")) as calls:
        send(ahead, calls)
        ahead.close()
        wait_until(lambda: peer._sockets[0].fileno() < 0)
        with pytest.raises(NotConnectedError, match="the client was closed"):
            send(ahead, calls)
