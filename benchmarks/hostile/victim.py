"""The server that is attacked, at one of its addresses."""

from __future__ import annotations

import json
import socket
import ssl
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import grpc

from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_protos.v1 import batch_norm_grad_pb2_grpc as pb_grpc
from bngrad_wire.lease_protocol import CALLS, REGIONS

TIMEOUT_S = 5.0
DOORS = ("tcp", "unix", "regions", "http")
"""The names of the addresses that a server may have."""


@dataclass(frozen=True)
class Victim:
    """A server, at one of its addresses.

    Attributes:
        addresses: Every address by the name of its door: "tcp", "unix" (the socket for calls with shared memory),
            "regions" (the socket for leases) and "http", as far as the server has them.
        token: The attacker's valid token; empty if the server asks for none.
        ca: The authority of the server's certificate; None without TLS.
        arena_bytes: The size of the server's arena.
        door: The one to attack.
    """

    addresses: dict[str, tuple[str, int] | str]
    token: str
    ca: str | None
    arena_bytes: int
    door: str = "tcp"

    @classmethod
    def discover(cls, target: str, token: str, ca: str | None, http: str | None = None) -> Victim:
        """Asks a server for its addresses."""
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        with channel(target, ca) as asked:
            stub = pb_grpc.BatchNormGradServiceStub(asked)
            # It waits, as others may be attacking the server already.
            request, timeout_s = pb.ServerInfoRequest(), 10 * TIMEOUT_S
            info = stub.ServerInfo(request, metadata=metadata, timeout=timeout_s, wait_for_ready=True)
        host, _, port = target.rpartition(":")
        addresses: dict[str, tuple[str, int] | str] = {"tcp": (host, int(port))}
        if directory := info.endpoints.local_directory:
            addresses |= {"unix": f"{directory}/{CALLS}", "regions": f"{directory}/{REGIONS}"}
        if http is not None:
            addresses["http"] = (http.rpartition(":")[0], int(http.rpartition(":")[2]))
        return cls(addresses, token, ca, info.limits.arena_bytes)

    @classmethod
    def load(cls, path: Path) -> Victim:
        """Reads what `save` has written."""
        facts = json.loads(path.read_text())
        addresses = {
            door: where if isinstance(where, str) else tuple(where) for door, where in facts["addresses"].items()
        }
        return cls(**(facts | {"addresses": addresses}))

    def save(self, path: Path) -> None:
        """Writes it for other processes: a server under attack may not answer when it is asked for its addresses."""
        path.write_text(json.dumps(asdict(self)))

    def at(self, door: str) -> Victim:
        return replace(self, door=door)

    def plain(self) -> socket.socket:
        """Connects, without TLS."""
        address = self.addresses[self.door]
        if isinstance(address, tuple):
            return socket.create_connection(address, TIMEOUT_S)
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(TIMEOUT_S)
        try:
            sock.connect(address)
        except OSError:
            sock.close()
            raise
        return sock

    def connect(self) -> socket.socket:
        """Connects, with TLS if the address has it."""
        address = self.addresses[self.door]
        if self.ca is None or self.door == "http" or not isinstance(address, tuple):
            return self.plain()
        context = ssl.create_default_context(cafile=self.ca)
        context.set_alpn_protocols(["h2"])
        return context.wrap_socket(self.plain(), server_hostname=address[0])


def channel(target: str, ca: str | None) -> grpc.Channel:
    """Opens a connection of its own, with TLS if an authority is given."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    if ca is None:
        return grpc.insecure_channel(target, options)
    return grpc.secure_channel(target, grpc.ssl_channel_credentials(Path(ca).read_bytes()), options)
