"""Hostile clients of all kinds, while a well-behaved one is served."""

from __future__ import annotations

import gzip
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import grpc
import psutil
import pytest
from tests.raw_http2 import path_of, request
from tests.security.conftest import LISTENERS, Guarded, ask
from tests.servers import wait_until

import bngrad
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_wire.token_format import new_token

_MOST_MEMORY = 700 * 2**20
_SPARE_DESCRIPTORS = 32
_CALLS = 10
_HALF_OPEN = 10_000
_PAUSE_S = 1.0
_CONNECTION_BYTES = 40_000
_ATTACKS = (
    "wrong_tls",
    "wrong_tokens",
    "garbage",
    "half_open",
    "huge_metadata",
    "bombs",
    "flood_resets",
    "headers_byte_by_byte",
)
"""Of `benchmarks.hostile`; the tests of each part of the server have the others."""


@pytest.fixture(scope="module")
def open_to_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """A server that requires tokens but no client certificates, so that attackers pass the TLS handshake."""
    with Guarded(tmp_path_factory.mktemp("hostile"), client_ca=False).running() as guarded:
        yield guarded


@contextmanager
def attack(name: str, guarded: Guarded) -> Iterator[subprocess.Popen[bytes]]:
    arguments = [name, "--target", guarded.server.target, "--token", guarded.token, "--ca", str(guarded.authority.path)]
    command = [sys.executable, "-m", "benchmarks.hostile", *arguments, "--doors", "tcp"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path.cwd()) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline(), f"{name} did not begin"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("name", _ATTACKS)
def test_a_good_client_is_served_beside_hostile_ones(open_to_all: Guarded, name: str) -> None:
    guarded = open_to_all
    front = psutil.Process(guarded.server.process.pid)
    with guarded.client(transport="unary") as unary, guarded.client(transport="stream") as stream:
        for client in (unary, stream):
            ask(client)
        descriptors = front.num_fds()
        with attack(name, guarded) as bad:
            for _ in range(_CALLS):
                for client in (unary, stream):
                    ask(client)
                with guarded.client(transport="unary") as newcomer:
                    ask(newcomer)
            assert bad.poll() is None
            assert front.memory_info().rss < _MOST_MEMORY
        wait_until(lambda: front.num_fds() <= descriptors + _SPARE_DESCRIPTORS)
    assert "Traceback" not in guarded.server.stderr()


def test_half_open_connections_take_memory_and_descriptors_up_to_a_limit(open_to_all: Guarded) -> None:
    """Connected clients are served meanwhile; new ones get in once handshakes have timed out."""
    guarded = open_to_all
    front = psutil.Process(guarded.server.process.pid)
    most = 1024  # connections that have made no call
    with guarded.client(transport="unary") as unary, guarded.client(transport="stream") as stream:
        for client in (unary, stream):
            ask(client)
        descriptors, memory = front.num_fds(), front.memory_info().rss
        most_seen = descriptors
        with many_descriptors(), ExitStack() as held:
            for number in range(_HALF_OPEN):
                with suppress(OSError):
                    held.enter_context(socket.create_connection(guarded.port, 60))
                if number % 500 == 0:
                    most_seen = max(most_seen, front.num_fds())
            for client in (unary, stream):
                ask(client)
            assert descriptors + most // 4 < most_seen <= descriptors + most + _SPARE_DESCRIPTORS
            assert front.memory_info().rss < memory + 2 * _CONNECTION_BYTES * most
            with guarded.client(transport="unary") as newcomer:
                wait_until(lambda: is_answered(newcomer))
        wait_until(lambda: front.num_fds() <= descriptors + _SPARE_DESCRIPTORS)


def is_answered(client: bngrad.Client) -> bool:
    try:
        ask(client)
    except bngrad.UnavailableError:
        return False
    return True


@contextmanager
def many_descriptors() -> Iterator[None]:
    """Raises this process's limit of descriptors during the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("listener", LISTENERS)
def test_compressed_messages_are_refused_unread(open_to_all: Guarded, listener: str) -> None:
    """A compressed megabyte may expand to a gigabyte."""
    bomb = gzip.compress(bytes(2**26), 9)
    with open_to_all.channel(listener) as channel:
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(path_of("FusedBatchNormGradV2"))
        with pytest.raises(grpc.RpcError) as refused:
            call(bomb, metadata=_as(open_to_all.token), compression=grpc.Compression.Gzip, timeout=60)
        assert isinstance(refused.value, grpc.Call)
        assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("listener", LISTENERS)
def test_a_client_has_no_more_than_its_share(limited: tuple[Guarded, str], listener: str) -> None:
    """Shares are counted by token, not by address."""
    guarded, bob = limited
    message = request(4096).SerializeToString()
    begun = pb.ExchangeRequest(fused_batch_norm_grad_v2=request(4096, whole=False)).SerializeToString()
    go_on = threading.Event()

    def upload() -> Iterator[bytes]:
        yield begun
        go_on.wait(60)

    with guarded.channel(listener) as first, guarded.channel(listener) as second:
        exchange: grpc.StreamStreamMultiCallable[bytes, bytes] = first.stream_stream(path_of("Exchange"))
        held = exchange(upload(), metadata=_as(guarded.token), timeout=60)
        try:
            wait_until(lambda: guarded.info().requests == 1)
            assert code_of(second, message, guarded.token) == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert code_of(second, message, bob) == grpc.StatusCode.OK
        finally:
            held.cancel()
            go_on.set()
        wait_until(lambda: code_of(second, message, guarded.token) == grpc.StatusCode.OK)


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Guarded, str]]:
    """A server that allows one request at once for each client, and a second client's token."""
    token, line = new_token("bob")
    guarded = Guarded(tmp_path_factory.mktemp("limited"), options=("--max-client-requests", "1"))
    guarded.know(guarded.tokens.read_text().strip(), line)
    with guarded.running():
        yield guarded, token


def code_of(channel: grpc.Channel, message: bytes, token: str) -> grpc.StatusCode:
    call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(path_of("FusedBatchNormGradV2"))
    future = call.future(message, metadata=_as(token), timeout=60)
    future.exception()
    return future.code()


def _as(token: str) -> tuple[tuple[str, str]]:
    return (("authorization", f"Bearer {token}"),)
