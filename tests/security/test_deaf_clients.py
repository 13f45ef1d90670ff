"""Clients that read no answers, or do not finish their messages: they keep nothing from others."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import grpc
import psutil
import pytest
from tests.deaf_client import DeafClient
from tests.raw_http2 import path_of, prefixed, request
from tests.security.conftest import Guarded
from tests.servers import wait_until

from bngrad_wire.token_format import new_token

OP = path_of("FusedBatchNormGradV2")
MIB = 2**20
SMALL = request(2**14).SerializeToString()
LARGE = request(MIB).SerializeToString()
"""Its answer has a megabyte."""
UNREAD = 200
CALLS = 64
AT_ONCE_S = 10.0
ENDLESS = ("--transfer-timeout", "600")
"""So that no transfer ends by itself during a test."""
ARENA_NBYTES = 64 * MIB


class Tenants:
    """A server without TLS, and two clients with tokens: alice, who is deaf, and bob."""

    def __init__(self, guarded: Guarded, alice: str, bob: str) -> None:
        self.guarded = guarded
        self._alice, self._bob = alice, bob

    def deaf(self) -> DeafClient:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(str(self.guarded.socket))
        return DeafClient(sock, metadata=_as(self._alice))

    def code(self, *messages: bytes, path: str = OP, of_alice: bool = False) -> grpc.StatusCode:
        """Returns how a call of bob's ends, or of alice's."""
        metadata = _as(self._alice if of_alice else self._bob)
        with self.guarded.channel("Unix") as channel:
            method: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(path)
            call = method(iter(messages), metadata=metadata, timeout=AT_ONCE_S)
            with suppress(grpc.RpcError):
                list(call)
            return call.code()

    @property
    def in_flight(self) -> int:
        return self.guarded.info().requests

    @property
    def memory(self) -> int:
        """The memory of the front process, without what it shares with the workers."""
        used = psutil.Process(self.guarded.server.process.pid).memory_info()
        return int(used.rss - used.shared)


def _as(token: str) -> tuple[tuple[str, str]]:
    return (("authorization", f"Bearer {token}"),)


@pytest.fixture
def tenants(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    bob, line = new_token("bob")
    guarded = Guarded(tmp_path_factory.mktemp("deaf"), options=request.param)
    guarded.know(guarded.tokens.read_text().strip(), line)
    with guarded.running():
        yield Tenants(guarded, guarded.token, bob)
        assert "Traceback" not in guarded.server.stderr()


@pytest.mark.parametrize("tenants", [(*ENDLESS, "--max-client-requests", "1")], indirect=True)
@pytest.mark.parametrize("end", ["reset", "close"])
def test_an_unread_answer_counts_until_its_call_ends(tenants: Tenants, end: str) -> None:
    with ExitStack() as stack:
        deaf = stack.enter_context(tenants.deaf())
        stream = deaf.call(OP, prefixed(SMALL))
        wait_until(lambda: stream in deaf.answered)
        assert tenants.in_flight == 1
        assert tenants.code(SMALL, of_alice=True) == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert tenants.code(SMALL) == grpc.StatusCode.OK
        if end == "reset":
            deaf.reset(stream)
        else:
            stack.close()
        wait_until(lambda: tenants.in_flight == 0, AT_ONCE_S)
        assert tenants.code(SMALL, of_alice=True) == grpc.StatusCode.OK


@pytest.mark.parametrize("tenants", [("--transfer-timeout", "1")], indirect=True)
def test_an_unread_answer_is_cancelled_in_time(tenants: Tenants) -> None:
    with tenants.deaf() as deaf:
        stream = deaf.call(OP, prefixed(SMALL))
        wait_until(lambda: stream in deaf.ended)
        assert deaf.ended[stream] in ("1", "reset")
        wait_until(lambda: tenants.in_flight == 0, AT_ONCE_S)


@pytest.mark.parametrize("tenants", [(*ENDLESS, "--arena-bytes", str(ARENA_NBYTES))], indirect=True)
def test_unread_answers_take_bounded_memory_and_leave_room_for_others(tenants: Tenants) -> None:
    assert tenants.code(LARGE) == grpc.StatusCode.OK
    before = tenants.memory
    with ExitStack() as stack:
        peers = []
        for _ in range(UNREAD // 40):
            peers.append(peer := stack.enter_context(tenants.deaf()))
            for _ in range(40):
                peer.call(OP, prefixed(LARGE))
        wait_until(lambda: sum(len(peer.answered | peer.ended.keys()) for peer in peers) == UNREAD)
        assert tenants.code(LARGE) == grpc.StatusCode.OK
        assert tenants.memory < before + UNREAD * MIB
    wait_until(lambda: tenants.in_flight == 0, AT_ONCE_S)


LIMITED = (*ENDLESS, "--max-wait", "60", "--max-client-bytes", str(8 * MIB))


@pytest.mark.parametrize("tenants", [LIMITED], indirect=True)
def test_messages_of_a_client_at_its_limit_are_not_received(tenants: Tenants) -> None:
    with tenants.deaf() as deaf:
        for number in range(3):
            deaf.call(OP, prefixed(LARGE))
            wait_until(lambda number=number: len(deaf.answered) > number)  # type: ignore[misc]
        for _ in range(40):
            deaf.call(OP, prefixed(LARGE))
        time.sleep(1)
        # The third was refused, and those that the event loop had received whole, of which it has 32 MiB; others wait.
        assert set(deaf.ended.values()) == {"8"}
        assert len(deaf.ended) <= 1 + 32 * MIB // (2 * MIB)
        assert tenants.code(LARGE) == grpc.StatusCode.OK


@pytest.mark.parametrize("tenants", [ENDLESS], indirect=True)
@pytest.mark.parametrize(("method", "messages"), [("FusedBatchNormGradV2", [SMALL]), ("Exchange", [])])
def test_others_are_served_while_a_client_does_not_finish_its_messages(
    tenants: Tenants, method: str, messages: list[bytes]
) -> None:
    """Each of its calls would occupy a thread of the port."""
    with ExitStack() as stack:
        for _ in range(3):
            peer = stack.enter_context(tenants.deaf())
            for _ in range(CALLS):
                peer.call(path_of(method), prefixed(LARGE)[:1000], end=False)
        assert tenants.code(*messages, path=path_of(method)) == grpc.StatusCode.OK


@pytest.mark.parametrize("tenants", [ENDLESS], indirect=True)
def test_unread_answers_of_other_calls_are_bounded_in_number(tenants: Tenants) -> None:
    with ExitStack() as stack:
        peers = [stack.enter_context(tenants.deaf()) for _ in range(10)]
        for peer in peers:
            for _ in range(CALLS):
                peer.call(path_of("ServerInfo"), prefixed(b""))
        wait_until(lambda: sum(len(peer.ended) for peer in peers) >= 10 * CALLS - 512)
        assert tenants.code(SMALL) == grpc.StatusCode.OK
