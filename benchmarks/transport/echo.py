"""A bare gRPC service without protobuf and without compute: what gRPC itself costs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from concurrent import futures

import grpc
from benchmarks.transport import CHANNEL_OPTIONS, Call, Prepare

from bngrad_kernels.problem import Problem

_HANDLER_THREADS = 64
_SERVICE, _METHOD = "benchmarks.Echo", "Echo"


@functools.lru_cache(maxsize=1)
def _zeros(nbytes: int) -> bytes:
    return bytes(nbytes)


def _answer(request: bytes, context: grpc.ServicerContext) -> bytes:
    """Returns as many bytes as one of the two tensors sent."""
    return _zeros(len(request) // 2)


def start(address: str, threads: int, device: str) -> tuple[str, object]:
    """Serves for as long as the second object lives; the first is the address that clients take."""
    server = grpc.server(futures.ThreadPoolExecutor(_HANDLER_THREADS), options=CHANNEL_OPTIONS)
    method: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(
        _answer
    )  # Without a serializer, messages are bytes.
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: method}),))
    port = server.add_insecure_port(address)
    server.start()
    return address if address.startswith("unix:") else f"127.0.0.1:{port}", server


@contextlib.contextmanager
def connect(target: str, *, empty: bool = False) -> Iterator[Prepare]:
    """Sends the bytes of both tensors, made beforehand, or none."""
    with grpc.insecure_channel(target, CHANNEL_OPTIONS) as channel:
        echo: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/{_SERVICE}/{_METHOD}")

        @contextlib.contextmanager
        def prepare(problem: Problem) -> Iterator[Call]:
            request = b"" if empty else problem.y_backprop.tobytes() + problem.x.tobytes()

            def call() -> None:
                echo(request)

            yield call

        yield prepare
