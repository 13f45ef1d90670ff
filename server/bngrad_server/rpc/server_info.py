"""What ServerInfo answers: the server's devices, limits, ops and endpoints."""

from __future__ import annotations

from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_server.codec.ops import OPS
from bngrad_server.engine import Engine
from bngrad_server.workers.supervisor import WorkerState
from bngrad_wire import __version__

_WORKER_STATES = {WorkerState.STARTING: pb.WORKER_STATE_STARTING, WorkerState.READY: pb.WORKER_STATE_READY}


class ServerInfo:
    """Describes the server to clients.

    Attributes:
        endpoints: Where clients find the HTTP/2 port and shared memory.
    """

    def __init__(self, engine: Engine) -> None:
        self.endpoints = pb.Endpoints(copied_ahead_bytes=engine.sent_ahead.places.least_nbytes)
        self._engine = engine

    def response(self) -> bytes:
        """Returns the serialised response of ServerInfo."""
        devices = [
            pb.Device(
                name=status.name,
                description=status.description,
                state=_WORKER_STATES[status.state],
                restarts=status.restarts,
                memory_bytes=status.memory_bytes,
            )
            for status in self._engine.pool.status()
        ]
        limits = pb.Limits(max_message_bytes=self._engine.max_message_nbytes, arena_bytes=self._engine.arena.nbytes)
        return pb.ServerInfoResponse(
            version=__version__,
            devices=devices,
            limits=limits,
            ops=[op.name for op in OPS],
            endpoints=self.endpoints,
            requests=self._engine.admission.admitted,
            unread_connections=self._engine.load.unread_connections,
            batch_sizes=self._engine.batcher.counts.sizes,
            device_remark=self._engine.device_remark,
            compiling=self._engine.pool.compiling,
        ).SerializeToString()
