"""Authorised clients are answered on every address; others learn nothing."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from tests.raw_http2 import path_of, request
from tests.security.conftest import LISTENERS, Guarded, ask
from tests.servers import TRANSPORTS, Transport, wait_until

import bngrad
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_wire.token_format import new_token

_METHODS = (
    path_of("FusedBatchNormGradV2"),
    path_of("Exchange"),
    path_of("ServerInfo"),
    path_of("NoSuchMethod"),
    "/no.such.Service/Method",
    "/grpc.health.v1.Health/Check",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
)


def kept(metadata: list[tuple[str, str]]) -> str:
    return ", ".join(f"{name}: {value[:12]}" for name, value in metadata) or "nothing"


@pytest.mark.parametrize("over", ["TCP", "Unix"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_known_client_is_answered(guarded: Guarded, transport: Transport, over: str) -> None:
    target = guarded.server.target if over == "TCP" else guarded.unix_target
    with guarded.client(target, transport=transport) as client:
        ask(client)
        assert client.server_info().devices


async def test_a_known_asynchronous_client_is_answered(guarded: Guarded) -> None:
    async with bngrad.aio.Client(guarded.server.target, tls=guarded.tls, token=guarded.token) as client:
        assert (await client.server_info()).devices


@pytest.mark.parametrize(
    "metadata",
    [
        [],
        [("authorization", "")],
        [("authorization", "Bearer wrong")],
        [("authorization", f"Bearer {new_token('alice')[0]}")],
        [("authorization", "Basic YWxpY2U6YWxpY2U=")],
        [("authorization", "Bearer {}"), ("authorization", "Bearer wrong")],
        [("x-token", "{}")],
    ],
    ids=kept,
)
@pytest.mark.parametrize("listener", LISTENERS)
def test_unauthenticated_calls_learn_nothing(guarded: Guarded, listener: str, metadata: list[tuple[str, str]]) -> None:
    """Every method gives the same answer, existing or not, whatever is sent."""
    sent = tuple((name, value.replace("{}", guarded.token)) for name, value in metadata)
    said: set[object] = set()
    with guarded.channel(listener) as channel:
        for method in _METHODS:
            for message in (b"", b"garbage", request(4096).SerializeToString()):
                call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method)
                with pytest.raises(grpc.RpcError) as refused:
                    call(message, metadata=sent, timeout=60)
                error = refused.value
                assert isinstance(error, grpc.Call)
                said.add(
                    (error.code(), error.details(), tuple(error.initial_metadata()), tuple(error.trailing_metadata()))
                )
    assert said == {(grpc.StatusCode.UNAUTHENTICATED, "a valid token is needed", (), ())}


@pytest.mark.parametrize("listener", LISTENERS)
def test_an_unauthenticated_call_is_refused_before_its_message(guarded: Guarded, listener: str) -> None:
    with guarded.channel(listener) as channel:
        for method in _METHODS:
            call: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(method)
            responses = call(iter(lambda: b"x" * 1000, None), timeout=60)
            with pytest.raises(grpc.RpcError) as refused:
                next(responses)
            assert isinstance(refused.value, grpc.Call)
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("token", [None, "wrong"])
def test_the_sdk_raises_unauthenticated(guarded: Guarded, transport: Transport, token: str | None) -> None:
    for target in (guarded.server.target, guarded.unix_target):
        with (
            guarded.client(target, token=token, transport=transport) as client,
            pytest.raises(bngrad.UnauthenticatedError, match="a valid token is needed") as refused,
        ):
            ask(client)
        assert isinstance(refused.value, PermissionError)
        assert "wrong" not in str(refused.value)


@pytest.mark.parametrize("authorization", ["", "Bearer wrong", "Bearer " + "x" * 5000])
def test_an_unauthenticated_client_gets_no_shared_memory(guarded: Guarded, authorization: str) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(f"{guarded.endpoints.local_directory}/regions")
        sock.sendall(struct.pack("<Q", 2**20) + authorization.encode())
        message, fds, _, _ = socket.recv_fds(sock, 1024, 1)
    assert not fds
    assert message in (b"a valid token is needed", b"")


def test_an_exchange_ends_when_its_token_is_revoked(own_guarded: Guarded) -> None:
    guarded = own_guarded
    metadata = (("authorization", f"Bearer {guarded.token}"),)
    part = pb.ExchangeRequest(fused_batch_norm_grad_v2=request(0)).SerializeToString()
    is_out = threading.Event()

    def requests() -> Iterator[bytes]:
        yield part
        is_out.wait(60)
        yield part

    with ExitStack() as stack:
        running = []
        for listener in LISTENERS:
            channel = stack.enter_context(guarded.channel(listener))
            call: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(path_of("Exchange"))
            running.append(call(requests(), metadata=metadata, timeout=60))
            assert next(running[-1])
        guarded.know(new_token("bob")[1])
        wait_until(lambda: not is_known(guarded))
        is_out.set()
        for responses in running:
            with pytest.raises(grpc.RpcError) as refused:
                list(responses)
            assert isinstance(refused.value, grpc.Call)
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED


_ASK = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()
_HEALTH = health_pb2.HealthCheckRequest().SerializeToString()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", _ASK),
        ("/grpc.health.v1.Health/Watch", _HEALTH),
    ],
    ids=["reflection", "health"],
)
def test_other_streams_end_when_their_token_is_revoked(own_guarded: Guarded, path: str, message: bytes) -> None:
    guarded, is_over = own_guarded, threading.Event()

    def messages() -> Iterator[bytes]:
        yield message
        if "Watch" in path:
            return
        while not is_over.wait(0.01):
            yield message

    with guarded.channel("TCP") as channel:
        method: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(path)
        call = method(messages(), metadata=(("authorization", f"Bearer {guarded.token}"),), timeout=60)
        try:
            assert next(call)
            guarded.know(new_token("bob")[1])
            with pytest.raises(grpc.RpcError):
                list(call)
        finally:
            is_over.set()
        assert call.code() == grpc.StatusCode.UNAUTHENTICATED


def is_known(guarded: Guarded) -> bool:
    with guarded.client(transport="unary") as client:
        try:
            ask(client)
        except bngrad.UnauthenticatedError:
            return False
        return True


def test_the_log_tells_of_a_mistake_in_the_token_file_without_a_call(own_guarded: Guarded) -> None:
    own_guarded.know("a line with a mistake")
    wait_until(lambda: "cannot be used, so the old content stays in use: line 1 of" in own_guarded.server.stderr())


def test_tokens_appear_in_no_error_log_or_repr(guarded: Guarded) -> None:
    with guarded.client() as client:
        ask(client)
        assert guarded.token not in repr(client)
        assert not any(guarded.token in repr(vars(part)) for part in vars(client).values())
    assert guarded.token not in guarded.server.stderr()


def test_only_the_owner_may_use_the_socket(guarded: Guarded) -> None:
    assert guarded.socket.stat().st_mode & 0o777 == 0o600
