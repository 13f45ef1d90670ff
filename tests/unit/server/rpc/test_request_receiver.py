"""Which calls are counted that end before their ops are known."""

from __future__ import annotations

from concurrent.futures import CancelledError

import grpc
import pytest
from google.protobuf.message import DecodeError

from bngrad_server.config import ServerConfig
from bngrad_server.engine import Engine
from bngrad_server.errors import MessageTooLargeError, OverloadedError, UnauthenticatedError
from bngrad_server.rpc.request_receiver import RequestReceiver
from bngrad_wire import http2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DecodeError(), "INVALID_ARGUMENT"),
        (MessageTooLargeError(), "RESOURCE_EXHAUSTED"),
        (OverloadedError(""), "RESOURCE_EXHAUSTED"),
        (http2.RpcError(grpc.StatusCode.UNIMPLEMENTED.value[0], "compressed"), "UNIMPLEMENTED"),
        (UnauthenticatedError(), ""),  # which is counted where it is found out
        (CancelledError(), ""),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_a_call_is_counted_as_refused_for_what_its_client_sent(error: Exception, code: str) -> None:
    engine = Engine(ServerConfig(), lambda: None)
    RequestReceiver(engine, {}, {}).count_refused(error)
    counts = engine.observer.metrics.status()["refused_calls"]
    assert {name: count for name, count in counts.items() if count} == ({code: 1} if code else {})
    engine.close()
