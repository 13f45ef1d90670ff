"""A plain unary service: the stock generated servicer and stub of bngrad's .proto file, tensors as ``bytes``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent import futures

import grpc
import numpy as np
from benchmarks.transport import CHANNEL_OPTIONS, Call, Gradients, Prepare
from benchmarks.transport.kernel import Kernel

from bngrad_kernels.problem import Array, Problem
from bngrad_kernels.spec import FLOAT32, Spec
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_protos.v1 import batch_norm_grad_pb2_grpc as pb_grpc

_HANDLER_THREADS = 64


class _Service(pb_grpc.BatchNormGradServiceServicer):
    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def FusedBatchNormGradV2(  # noqa: N802 - gRPC's name
        self, request: pb.FusedBatchNormGradV2Request, context: grpc.ServicerContext
    ) -> pb.FusedBatchNormGradV2Response:
        x = _array(request.x)
        scale, mean, variance = map(_array, (request.scale, request.reserve_space_1, request.reserve_space_2))
        spec = Spec(FLOAT32, x.shape, 3, epsilon=request.epsilon, is_training=request.is_training)
        problem = Problem.allocate(spec, _array(request.y_backprop), x, scale, mean, variance)
        answer = self._kernel.run(problem)
        return pb.FusedBatchNormGradV2Response(
            x_backprop=_tensor(answer.x_backprop),
            scale_backprop=_tensor(answer.scale_backprop),
            offset_backprop=_tensor(answer.offset_backprop),
        )


def start(address: str, threads: int, device: str) -> tuple[str, object]:
    """Serves for as long as the second object lives; the first is the address that clients take."""
    server = grpc.server(futures.ThreadPoolExecutor(_HANDLER_THREADS), options=CHANNEL_OPTIONS)
    service = _Service(Kernel(threads, device))  # type: ignore[abstract]  # The other methods answer UNIMPLEMENTED.
    pb_grpc.add_BatchNormGradServiceServicer_to_server(service, server)
    port = server.add_insecure_port(address)
    server.start()
    return address if address.startswith("unix:") else f"127.0.0.1:{port}", server


@contextlib.contextmanager
def connect(target: str) -> Iterator[Prepare]:
    with grpc.insecure_channel(target, CHANNEL_OPTIONS) as channel:
        stub = pb_grpc.BatchNormGradServiceStub(channel)

        @contextlib.contextmanager
        def prepare(problem: Problem) -> Iterator[Call]:
            yield lambda: _call(stub, problem)

        yield prepare


def _call(stub: pb_grpc.BatchNormGradServiceStub, problem: Problem) -> Gradients:
    assert problem.scale is not None
    request = pb.FusedBatchNormGradV2Request(
        y_backprop=_tensor(problem.y_backprop),
        x=_tensor(problem.x),
        scale=_tensor(problem.scale),
        reserve_space_1=_tensor(problem.reserve_space_1),
        reserve_space_2=_tensor(problem.reserve_space_2),
        epsilon=problem.spec.epsilon,
        is_training=problem.spec.is_training,
    )
    response = stub.FusedBatchNormGradV2(request)
    return Gradients(*map(_array, (response.x_backprop, response.scale_backprop, response.offset_backprop)))


def _tensor(array: Array) -> pb.Tensor:
    return pb.Tensor(dtype=pb.DATA_TYPE_FLOAT32, shape=array.shape, data=array.tobytes())


def _array(tensor: pb.Tensor) -> Array:
    return np.frombuffer(tensor.data, np.float32).reshape(tuple(tensor.shape))
