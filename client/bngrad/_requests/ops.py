"""The ops that the client can call."""

from __future__ import annotations

from bngrad._requests.request import OpSchema
from bngrad._results import (
    BatchNormTrainingBackprop,
    FusedBatchNormGradGrad,
    FusedBatchNormGradV2,
    FusedBatchNormGradV3,
)

V3 = OpSchema(FusedBatchNormGradV3, large=("y_backprop", "x"))
V2 = OpSchema(FusedBatchNormGradV2, large=("y_backprop", "x"))
TRAINING_BACKPROP = OpSchema(BatchNormTrainingBackprop, large=("input_forward", "output_delta"))
GRAD_GRAD = OpSchema(FusedBatchNormGradGrad, large=("grad_x_backprop", "y_backprop", "x"))
