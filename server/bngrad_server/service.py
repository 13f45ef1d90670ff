"""The calls of ``bngrad.v1.BatchNormGradService``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import grpc

from bngrad_kernels.problem import Problem
from bngrad_protos import __version__
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_protos.v1 import batch_norm_grad_pb2_grpc as pb_grpc
from bngrad_server import messages
from bngrad_server.config import MAX_MESSAGE_BYTES
from bngrad_server.engine import Engine, Request
from bngrad_server.errors import status_of_errors
from bngrad_server.pool import WorkerState

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["BatchNormGradService"].full_name

_WORKER_STATES = {
    WorkerState.STARTING: pb.WORKER_STATE_STARTING,
    WorkerState.READY: pb.WORKER_STATE_READY,
}

RequestMessage = TypeVar("RequestMessage")
ResponseMessage = TypeVar("ResponseMessage")


class BatchNormGradService(pb_grpc.BatchNormGradServiceServicer):
    """Answers from an engine; every method documented in the .proto file."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def FusedBatchNormGradV3(  # noqa: D102, N802
        self, request: pb.FusedBatchNormGradV3Request, context: grpc.ServicerContext
    ) -> pb.FusedBatchNormGradV3Response:
        return self._answer(request, context, messages.read_v3_request, messages.v3_response)

    def FusedBatchNormGradV2(  # noqa: D102, N802
        self, request: pb.FusedBatchNormGradV2Request, context: grpc.ServicerContext
    ) -> pb.FusedBatchNormGradV2Response:
        return self._answer(request, context, messages.read_v2_request, messages.v2_response)

    def BatchNormTrainingBackprop(  # noqa: D102, N802
        self, request: pb.BatchNormTrainingBackpropRequest, context: grpc.ServicerContext
    ) -> pb.BatchNormTrainingBackpropResponse:
        return self._answer(request, context, messages.read_onednn_request, messages.onednn_response)

    def ServerInfo(  # noqa: D102, N802
        self, request: pb.ServerInfoRequest, context: grpc.ServicerContext
    ) -> pb.ServerInfoResponse:
        devices = [
            pb.Device(
                name=status.name,
                description=status.description,
                state=_WORKER_STATES[status.state],
                restarts=status.restarts,
            )
            for status in self._engine.pool.status()
        ]
        limits = pb.Limits(max_message_bytes=MAX_MESSAGE_BYTES, arena_bytes=self._engine.arena.nbytes)
        ops = [method.name for method in pb.DESCRIPTOR.services_by_name["BatchNormGradService"].methods]
        ops.remove("ServerInfo")
        return pb.ServerInfoResponse(version=__version__, devices=devices, limits=limits, ops=ops)

    def _answer(
        self,
        message: RequestMessage,
        context: grpc.ServicerContext,
        read: Callable[[RequestMessage], Request],
        response: Callable[[Problem], ResponseMessage],
    ) -> ResponseMessage:
        with (
            status_of_errors(context),
            self._engine.computed(read(message), _timeout_s(context), context.add_callback) as problem,
        ):
            return response(problem)


def _timeout_s(context: grpc.ServicerContext) -> float | None:
    """The time that the client still gives; gRPC tells "for ever" as centuries, which no lock can wait for."""
    remaining_s = context.time_remaining()
    return None if remaining_s is None or remaining_s > threading.TIMEOUT_MAX else remaining_s
