"""Counters of calls and connections that are refused before they become requests."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from tests.monitoring.conftest import HTTP, http_of, samples
from tests.raw_http2 import PREFACE, path_of, request
from tests.security.conftest import Guarded
from tests.servers import wait_until

from bngrad_protos.v1 import batch_norm_grad_pb2 as pb

OP = "FusedBatchNormGradV2"
MESSAGE = request(4096).SerializeToString()


@pytest.fixture(scope="module")
def asking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """A server with TLS, tokens and metrics."""
    with Guarded(tmp_path_factory.mktemp("asking"), client_ca=False, options=HTTP).running() as guarded:
        yield guarded


@contextlib.contextmanager
def counted(guarded: Guarded, name: str, *labels: str) -> Iterator[None]:
    """Expects the counter to grow by one during the block."""
    http = http_of(guarded.server)
    before = samples(http).get((name, labels), 0)
    yield
    wait_until(lambda: samples(http).get((name, labels), 0) > before)
    assert samples(http)[name, labels] == before + 1


def call(guarded: Guarded, method: str, message: bytes, **options: Any) -> grpc.StatusCode:
    """Makes a call, as alice unless other metadata are given, and returns its status code."""
    options.setdefault("metadata", (("authorization", f"Bearer {guarded.token}"),))
    with guarded.channel("TCP") as channel:
        unary: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
            method if method.startswith("/") else path_of(method)
        )
        future = unary.future(message, timeout=60, **options)
        future.exception()
        return future.code()


@pytest.mark.parametrize(
    ("method", "message", "options", "code"),
    [
        (OP, MESSAGE, {"metadata": ()}, grpc.StatusCode.UNAUTHENTICATED),
        ("NoSuchMethod", b"", {"metadata": ()}, grpc.StatusCode.UNAUTHENTICATED),
        ("NoSuchMethod", b"", {}, grpc.StatusCode.UNIMPLEMENTED),
        ("/grpc.health.v1.Health/List", b"", {}, grpc.StatusCode.UNIMPLEMENTED),
        ("Exchange", b"\x0a", {}, grpc.StatusCode.INVALID_ARGUMENT),
        ("Exchange", pb.ExchangeRequest(chunk=b"x").SerializeToString(), {}, grpc.StatusCode.INVALID_ARGUMENT),
    ],
    ids=[
        "no token",
        "no token, no such method",
        "no such method",
        "no such method of health",
        "garbage",
        "a stray chunk",
    ],
)
def test_refused_calls_are_counted_by_status(
    asking: Guarded, method: str, message: bytes, options: dict[str, Any], code: grpc.StatusCode
) -> None:
    with counted(asking, "bngrad_refused_calls_total", code.name):
        assert call(asking, method, message, **options) == code


@pytest.mark.parametrize(
    ("message", "options", "code"),
    [(b"garbage", {}, "INVALID_ARGUMENT"), (MESSAGE, {"compression": grpc.Compression.Gzip}, "UNIMPLEMENTED")],
    ids=["garbage", "compressed"],
)
def test_requests_that_cannot_be_read_are_counted_by_their_op(
    asking: Guarded, message: bytes, options: dict[str, Any], code: str
) -> None:
    with counted(asking, "bngrad_requests_total", code, OP, "unary"):
        assert call(asking, OP, message, **options).name == code


def test_a_client_that_disconnects_before_its_message_is_counted(asking: Guarded) -> None:
    gone = threading.Event()

    def nothing() -> Iterator[bytes]:
        gone.wait(60)
        yield MESSAGE

    with counted(asking, "bngrad_requests_total", "CANCELLED", OP, "unary"), asking.channel("TCP") as channel:
        method: grpc.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(path_of(OP))
        metadata = (("authorization", f"Bearer {asking.token}"),)
        grpc.channel_ready_future(channel).result(60)  # otherwise the deadline might pass before the call arrives
        with pytest.raises(grpc.RpcError):
            method(nothing(), metadata=metadata, timeout=5)
        gone.set()


@pytest.mark.parametrize(
    ("said", "over_tls", "alpn", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", True, ["h2"], "protocol"),
        (b"GET / HTTP/1.1\r\n\r\n", False, [], "handshake"),
        (PREFACE, True, [], "handshake"),
        (PREFACE, True, ["http/1.1"], "handshake"),
        (PREFACE, True, ["h2"], "silent"),
    ],
    ids=["another protocol", "no TLS", "no ALPN", "HTTP/1.1 by ALPN", "no call"],
)
def test_refused_connections_are_counted_by_reason(
    asking: Guarded, said: bytes, over_tls: bool, alpn: list[str], reason: str
) -> None:
    context = ssl.create_default_context(cafile=asking.authority.path)
    if alpn:
        context.set_alpn_protocols(alpn)
    with (
        counted(asking, "bngrad_refused_connections_total", reason),
        socket.create_connection(asking.port, 60) as plain,
        context.wrap_socket(plain, server_hostname="localhost") if over_tls else plain as sock,
    ):
        sock.sendall(said)
        with contextlib.suppress(OSError):
            while sock.recv(4096):
                pass
