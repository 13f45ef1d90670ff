"""Tokens: each call is authenticated once, before anything else is done for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from tests.hostile_messages import HOSTILE, SIZES
from tests.unit.server.rpc.peers import Peer, new_peer
from tests.unit.server.workers.additions import inputs, request_of

from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_server.errors import UnauthenticatedError
from bngrad_server.security.auth import Authenticator
from bngrad_server.security.tokens import Tokens
from bngrad_wire import messages
from bngrad_wire.fields import FieldReader
from bngrad_wire.token_format import new_token

TOKEN, LINE = new_token("alice")
KNOWN = (("authorization", f"Bearer {TOKEN}"),)
UNKNOWN = (("authorization", "Bearer wrong"),)


class CountingAuthenticator(Authenticator):
    """Notes what each authentication has found: a client, or None."""

    def __init__(self, path: Path) -> None:
        path.write_text(LINE)
        super().__init__(Tokens(path))
        self.found: list[str | None] = []

    def authenticate(self, authorization: str | None, default: str) -> str:
        self.found.append(None)
        self.found[-1] = client = super().authenticate(authorization, default)
        return client


def ask_unary(peer: Peer, metadata: tuple[tuple[str, str], ...]) -> object:
    return peer.unary("FusedBatchNormGradV3", request_of(inputs()).SerializeToString(), metadata=metadata)


def ask_exchange(peer: Peer, metadata: tuple[tuple[str, str], ...]) -> object:
    arrays = inputs()
    request = pb.ExchangeRequest(fused_batch_norm_grad_v3=request_of(arrays, chunked=True))
    chunks = [pb.ExchangeRequest(chunk=arrays[name].tobytes()) for name in ("y_backprop", "x")]
    return peer.exchange(*(each.SerializeToString() for each in (request, *chunks)), metadata=metadata)


@pytest.mark.parametrize(
    ("ask", "count"), [(ask_unary, 1), (ask_exchange, 2)], ids=["unary", "exchange, and its request"]
)
def test_a_call_is_authenticated_once(ask: Callable[..., object], count: int, tmp_path: Path) -> None:
    authenticator = CountingAuthenticator(tmp_path / "tokens")
    with new_peer(tmp_path, authenticator) as peer:
        assert ask(peer, KNOWN)
        assert authenticator.found == ["token alice"] * count


@pytest.mark.parametrize("ask", [ask_unary, ask_exchange], ids=["unary", "exchange"])
def test_a_call_without_a_known_token_is_refused_once(ask: Callable[..., object], tmp_path: Path) -> None:
    authenticator = CountingAuthenticator(tmp_path / "tokens")
    with new_peer(tmp_path, authenticator) as peer:
        with pytest.raises(grpc.RpcError, match=str(UnauthenticatedError())) as refused:
            ask(peer, UNKNOWN)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert authenticator.found == [None]


@pytest.mark.parametrize("size", SIZES)
def test_no_message_is_parsed_before_its_token_is_checked(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small message has arrived with its headers, so that the HTTP/2 port would serve it inline."""
    parsed: list[str] = []
    for module, name in ((messages.Decoder, "known"), (messages, "only_field"), (FieldReader, "__init__")):
        monkeypatch.setattr(module, name, lambda *_: parsed.append("a message"))
    hostile = HOSTILE["unknown varints"](size)
    with new_peer(tmp_path, CountingAuthenticator(tmp_path / "tokens")) as peer:
        for ask in (
            lambda: peer.unary("FusedBatchNormGradV3", hostile, metadata=UNKNOWN),
            lambda: peer.exchange(hostile, metadata=UNKNOWN),
        ):
            with pytest.raises(grpc.RpcError, match=str(UnauthenticatedError())):
                ask()
    assert parsed == []
