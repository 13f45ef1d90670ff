"""A proxy that loses its server amid an answer makes the server unavailable, so that the call is repeated."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

import bngrad
from bngrad_wire.http2 import frames, header_block
from bngrad_wire.http2.errors import ErrorCode

_HEADERS = header_block.encode([(":status", "200"), ("content-type", "application/grpc")])


def _answer(listener: socket.socket) -> None:
    """Begins to answer the first call, and resets it as Envoy does."""
    connection, _ = listener.accept()
    with connection, connection.makefile("rb") as received:
        connection.sendall(frames.settings({}))
        received.read(len(frames.PREFACE))
        while head := received.read(9):
            received.read(int.from_bytes(head[:3], "big"))
            if head[3] == frames.HEADERS:
                stream = int.from_bytes(head[5:], "big")
                reset = frames.rst_stream(stream, ErrorCode.INTERNAL_ERROR)
                connection.sendall(b"".join([*frames.header_block(stream, _HEADERS, 0), reset]))


@pytest.fixture
def target() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_answer, args=(listener,))
        thread.start()
        yield "127.0.0.1:{1}".format(*listener.getsockname())
    thread.join()


def test_a_call_that_a_proxy_resets_is_one_that_no_server_answered(target: str) -> None:
    array, stats = np.ones((2, 3, 3, 4), np.float32), np.ones(4, np.float32)
    with bngrad.Client(target, transport="unary", retries=False) as client, pytest.raises(bngrad.UnavailableError):
        client.fused_batch_norm_grad_v2(array, array, stats, stats, stats)
