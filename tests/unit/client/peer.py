"""A real gRPC server in this process, which answers as each test says."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeAlias

import grpc

from bngrad_protos.v1 import batch_norm_grad_pb2 as pb

Answer: TypeAlias = Callable[[str, bytes, grpc.ServicerContext], bytes]
"""Makes an answer from the method's name, the request and the context."""


class _Handlers(grpc.GenericRpcHandler):
    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        service, _, method = handler_call_details.method.rpartition("/")
        assert service == "/bngrad.v1.BatchNormGradService"
        if method == "Exchange":
            return grpc.stream_stream_rpc_method_handler(self._exchange)
        return grpc.unary_unary_rpc_method_handler(lambda request, context: self._answer(method, request, context))

    def _exchange(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        method, request = joined(messages)
        yield from split(method, self._answer(method, request, context))


def joined(messages: Iterator[bytes]) -> tuple[str, bytes]:
    """Returns the op and the request that the messages of an exchange make up."""
    first = pb.ExchangeRequest.FromString(next(messages))
    part = first.WhichOneof("part")
    assert part not in (None, "chunk")
    request = getattr(first, part)
    elements = b"".join(pb.ExchangeRequest.FromString(message).chunk for message in messages)
    for _, tensor in request.ListFields()[:2]:
        assert not tensor.data
        nbytes = nbytes_of(tensor)
        tensor.data, elements = elements[:nbytes], elements[nbytes:]
    assert not elements
    return request.DESCRIPTOR.name.removesuffix("Request"), request.SerializeToString()


def nbytes_of(tensor: pb.Tensor) -> int:
    return math.prod(tensor.shape) * (4 if tensor.dtype == pb.DATA_TYPE_FLOAT32 else 2)


def split(method: str, response: bytes, chunk_nbytes: int = 2**20) -> Iterator[bytes]:
    """Returns the messages of an exchange that make up a response."""
    fields = pb.ExchangeResponse.DESCRIPTOR.fields
    part = next(field.name for field in fields if field.message_type and field.message_type.name == f"{method}Response")
    first = pb.ExchangeResponse()
    message = getattr(first, part)
    message.MergeFromString(response)
    tensor = message.ListFields()[0][1]
    elements, tensor.data = tensor.data, b""
    yield first.SerializeToString()
    for start in range(0, len(elements), chunk_nbytes):
        yield pb.ExchangeResponse(chunk=elements[start : start + chunk_nbytes]).SerializeToString()


@contextmanager
def peer(answer: Answer, address: str = "127.0.0.1:0") -> Iterator[str]:
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    with ThreadPoolExecutor(8) as threads:
        server = grpc.server(threads, handlers=[_Handlers(answer)], options=options)
        port = server.add_insecure_port(address)
        server.start()
        try:
            yield address if address.startswith("unix:") else f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait()


def info(method: str, request: bytes, context: grpc.ServicerContext) -> bytes:
    return pb.ServerInfoResponse(version="1.2.3").SerializeToString()


def echo(method: str, request: bytes, context: grpc.ServicerContext) -> bytes:
    """Answers an op with its own inputs."""
    if method == "ServerInfo":
        return info(method, request, context)
    return echoed(pb.FusedBatchNormGradV2Request.FromString(request))


def echoed(sent: pb.FusedBatchNormGradV2Request) -> bytes:
    return pb.FusedBatchNormGradV2Response(
        x_backprop=sent.x,
        scale_backprop=sent.scale,
        offset_backprop=sent.reserve_space_1,
        reserve_space_3=sent.reserve_space_2,
        reserve_space_4=sent.reserve_space_2,
    ).SerializeToString()
