"""An engine behind the HTTP/2 port, with a worker that is a thread in place of a process, and a gRPC client of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
from tests.unit.server.workers.additions import TIMEOUT_S, Adder, wait_until

from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_server.config import ServerConfig
from bngrad_server.engine import Engine
from bngrad_server.rpc.health import Health
from bngrad_server.rpc.http2.port import Http2Port
from bngrad_server.rpc.other_calls import other_calls
from bngrad_server.rpc.servicer import EXCHANGE_PATH, SERVICE, Servicer
from bngrad_server.security.auth import ALLOW_ALL, Authenticator
from bngrad_wire.limits import REGION_NBYTES

ARENA_NBYTES = 16 * 2**20
Metadata = tuple[tuple[str, str], ...]

identity: Callable[[bytes], bytes] = bytes


class Peer:
    def __init__(self, engine: Engine, channel: grpc.Channel) -> None:
        self.engine = engine
        self.channel = channel
        self.worker = Adder(engine)

    def unary(self, name: str, request: bytes, timeout: float = TIMEOUT_S, metadata: Metadata = ()) -> bytes:
        call = self.channel.unary_unary(f"/{SERVICE.full_name}/{name}", identity, identity)
        answer: bytes = call(request, timeout=timeout, metadata=metadata)
        return answer

    def exchange(
        self, *requests: bytes, timeout: float = TIMEOUT_S, metadata: Metadata = ()
    ) -> list[pb.ExchangeResponse]:
        call = self.channel.stream_stream(EXCHANGE_PATH, identity, identity)
        answers = call(iter(requests), timeout=timeout, metadata=metadata)
        return [pb.ExchangeResponse.FromString(answer) for answer in answers]

    @property
    def is_at_rest(self) -> bool:
        """Whether all memory has come back."""
        engine = self.engine
        return engine.arena.used_bytes == 0 and not any(region.holds for region in engine.regions)


@contextmanager
def listening(servicer: Servicer, path: Path) -> Iterator[None]:
    """A port that listens on a Unix socket."""
    health = Health(("",))
    port = Http2Port(servicer, other_calls(servicer, health, has_reflection=False), health)
    port.listen_on_path(path, 0o600)
    port.start()
    try:
        yield
    finally:
        port.stop(0)


@contextmanager
def new_peer(directory: Path, authenticator: Authenticator = ALLOW_ALL) -> Iterator[Peer]:
    """Starts an engine behind the port, and checks in the end that all memory has come back."""
    config = ServerConfig(arena_bytes=ARENA_NBYTES, shared_bytes=REGION_NBYTES, front_bytes=0)
    engine = Engine(config, lambda: None)
    path = directory / "calls"
    with listening(Servicer(engine, authenticator), path):
        with grpc.insecure_channel(f"unix:{path}") as channel:
            peer = Peer(engine, channel)
            engine.batcher.offer(peer.worker)
            yield peer
        wait_until(lambda: peer.is_at_rest)
    engine.close()
    peer.worker.close()
