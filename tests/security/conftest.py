"""A server that requires a certificate and a token on every address, and its client, alice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tests.security.authority import HOSTS, Authority, Pair
from tests.servers import ONE_WORKER

import bngrad
from bngrad_cli.embedded import EmbeddedServer
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_protos.v1 import batch_norm_grad_pb2_grpc as pb_grpc
from bngrad_wire.token_format import new_token

LISTENERS = ("TCP", "Unix", "local")
_ARRAY = np.ones((2, 3, 3, 4), np.float32)
_STATS = np.ones(4, np.float32)


def ask(client: bngrad.Client, *, timeout: float = 60, **attributes: Any) -> None:
    """Makes a call that an authorised client gets answered, unless its attributes are invalid."""
    client.fused_batch_norm_grad_v2(_ARRAY, _ARRAY, _STATS, _STATS, _STATS, timeout=timeout, **attributes)


class Guarded:
    def __init__(self, directory: Path, *, client_ca: bool = True, options: tuple[str, ...] = ()) -> None:
        self.directory = directory
        self.authority = Authority(directory)
        self.live = Pair(directory / "live.pem", directory / "live.key")
        self.client_ca = directory / "clients.pem"
        self.tokens = directory / "tokens"
        self.show(self.authority.issue(*HOSTS))
        self.accept(self.authority)
        self.alice = self.authority.issue("alice@work.example", common_name="alice")
        self.token, line = new_token("alice")
        self.tokens.write_text(f"{line}\n")
        self.socket = directory / "bngrad.sock"
        self.unix_target = f"unix:{self.socket}"
        self.options = (
            *ONE_WORKER,
            *("--listen", self.unix_target, "--token-file", str(self.tokens)),
            *("--tls-certificate", str(self.live.certificate), "--tls-key", str(self.live.key)),
            *(("--tls-client-ca", str(self.client_ca)) if client_ca else ()),
            *options,
        )
        self.server: EmbeddedServer

    @contextmanager
    def running(self) -> Iterator[Guarded]:
        with EmbeddedServer(options=self.options) as self.server:
            yield self

    def show(self, pair: Pair) -> None:
        """Replaces the server's certificate."""
        _replace(self.live.key, pair.key.read_bytes())
        _replace(self.live.certificate, pair.certificate.read_bytes())

    def accept(self, authority: Authority) -> None:
        """Makes the server accept clients of this authority only."""
        _replace(self.client_ca, authority.path.read_bytes())

    def know(self, *lines: str) -> None:
        """Makes the server accept these tokens only."""
        _replace(self.tokens, "".join(f"{line}\n" for line in lines).encode())

    @property
    def tls(self) -> bngrad.Tls:
        """Alice's certificate and the server's authority."""
        return bngrad.Tls(self.authority.path, self.alice.certificate, self.alice.key)

    def client(self, target: str | None = None, **arguments: Any) -> bngrad.Client:
        """Returns a client of alice, except for the arguments given."""
        return bngrad.Client(target or self.server.target, **{"tls": self.tls, "token": self.token, **arguments})

    @property
    def port(self) -> tuple[str, int]:
        """Host and port of the TCP address."""
        host, _, port = self.server.target.rpartition(":")
        return host, int(port)

    def channel(self, listener: str) -> grpc.Channel:
        """Returns a stock channel to an address, with a connection of its own, and alice's certificate over TCP."""
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        if listener.endswith("Unix"):
            target = self.unix_target if listener == "Unix" else f"unix:{self.endpoints.local_directory}/calls"
            return grpc.insecure_channel(target, options)
        return grpc.secure_channel(self.server.target, self.credentials, options)

    @property
    def credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(
            self.authority.path.read_bytes(), self.alice.key.read_bytes(), self.alice.certificate.read_bytes()
        )

    @cached_property
    def endpoints(self) -> pb.Endpoints:
        return self.info().endpoints

    def info(self) -> pb.ServerInfoResponse:
        metadata = (("authorization", f"Bearer {self.token}"),)
        with grpc.secure_channel(self.server.target, self.credentials) as channel:
            stub = pb_grpc.BatchNormGradServiceStub(channel)
            return stub.ServerInfo(pb.ServerInfoRequest(), metadata=metadata, timeout=60)


@pytest.fixture(scope="session")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """A server shared by all tests that leave it and its files unchanged."""
    with Guarded(tmp_path_factory.mktemp("guarded")).running() as guarded:
        yield guarded


@pytest.fixture
def own_guarded(tmp_path: Path) -> Iterator[Guarded]:
    """A server whose files the test may change."""
    with Guarded(tmp_path).running() as guarded:
        yield guarded


def _replace(path: Path, content: bytes) -> None:
    draft = path.with_name(f"{path.name}.new")
    draft.write_bytes(content)
    draft.rename(path)
