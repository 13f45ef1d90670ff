"""The ops that the client can call."""

from __future__ import annotations

from bngrad._requests.request import OpSchema
from bngrad._results import (
    BatchNormTrainingBackprop,
    FusedBatchNormGradGrad,
    FusedBatchNormGradV2,
    FusedBatchNormGradV3,
)
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb

V3 = OpSchema(
    "FusedBatchNormGradV3",
    pb.FusedBatchNormGradV3Request,
    pb.FusedBatchNormGradV3Response,
    FusedBatchNormGradV3,
    large=("y_backprop", "x"),
)
V2 = OpSchema(
    "FusedBatchNormGradV2",
    pb.FusedBatchNormGradV2Request,
    pb.FusedBatchNormGradV2Response,
    FusedBatchNormGradV2,
    large=("y_backprop", "x"),
)
TRAINING_BACKPROP = OpSchema(
    "BatchNormTrainingBackprop",
    pb.BatchNormTrainingBackpropRequest,
    pb.BatchNormTrainingBackpropResponse,
    BatchNormTrainingBackprop,
    large=("input_forward", "output_delta"),
)
GRAD_GRAD = OpSchema(
    "FusedBatchNormGradGrad",
    pb.FusedBatchNormGradGradRequest,
    pb.FusedBatchNormGradGradResponse,
    FusedBatchNormGradGrad,
    large=("grad_x_backprop", "y_backprop", "x"),
)
