"""Calls that are no op: health checks, reflection, ServerInfo.

The event loop answers those of one message that has arrived. Each other one has a thread, so none may last: a
reflection ends when its client pauses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from grpc_health.v1 import health as grpc_health
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from bngrad_server.rpc.health import Health
from bngrad_server.rpc.servicer import SERVER_INFO_PATH, SERVICE, Servicer

OtherCalls = Mapping[str, Callable[[bytes], bytes]]
"""What answers a message with a message, by the paths of the calls."""
REFLECTION_PATHS = frozenset(
    f"/{service}/ServerReflectionInfo" for service in (reflection.SERVICE_NAME, "grpc.reflection.v1.ServerReflection")
)
"""Those of them that are no unary calls. The messages of both versions are the same."""
CHECK_PATH = f"/{grpc_health.SERVICE_NAME}/Check"
WATCH_PATH = f"/{grpc_health.SERVICE_NAME}/Watch"
"""What `bngrad_server.rpc.http2.lanes.watches` answers."""
REFLECTED = (SERVICE.full_name, grpc_health.SERVICE_NAME, reflection.SERVICE_NAME)
"""The services that reflection lists; v1 of itself is not among them, as grpcio cannot describe it."""


def other_calls(servicer: Servicer, health: Health, *, has_reflection: bool) -> OtherCalls:
    """Returns what answers them; they raise google.protobuf's DecodeError, or `bngrad_wire.http2.RpcError`."""
    reflected = dict.fromkeys(REFLECTION_PATHS, _reflect) if has_reflection else {}
    return {
        SERVER_INFO_PATH: lambda _: servicer.info.response(),
        CHECK_PATH: lambda message: _check(health, message),
        **reflected,
    }


def _check(health: Health, message: bytes) -> bytes:
    request = health_pb2.HealthCheckRequest.FromString(message)
    return health.check(request.service).SerializeToString()


def _reflect(message: bytes) -> bytes:
    request = reflection_pb2.ServerReflectionRequest.FromString(message)
    (response,) = _REFLECTION.ServerReflectionInfo(iter([request]), cast("Any", None))
    return cast("bytes", response.SerializeToString())


_REFLECTION = reflection.ReflectionServicer(REFLECTED)
