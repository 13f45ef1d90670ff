"""A real gRPC server in this process, which answers as each test says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeAlias

import grpc

Answer: TypeAlias = Callable[[str, bytes, grpc.ServicerContext], bytes]
"""Makes an answer from the method's name, the request and the context."""


class _Handlers(grpc.GenericRpcHandler):
    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        service, _, method = handler_call_details.method.rpartition("/")
        assert service == "/bngrad.v1.BatchNormGradService"
        return grpc.unary_unary_rpc_method_handler(lambda request, context: self._answer(method, request, context))


@contextmanager
def peer(answer: Answer, address: str = "127.0.0.1:0") -> Iterator[str]:
    """Serves for the length of the block, and gives the target."""
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    with ThreadPoolExecutor(8) as threads:
        server = grpc.server(threads, handlers=[_Handlers(answer)], options=options)
        port = server.add_insecure_port(address)
        server.start()
        try:
            yield address if address.startswith("unix:") else f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait()
