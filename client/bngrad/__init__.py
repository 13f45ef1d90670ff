"""Client of bngrad, the gRPC service that computes gradients of fused batch normalisation.

    with bngrad.Client("localhost:50051") as client:
        gradients = client.fused_batch_norm_grad_v3(y_backprop, x, scale, mean, variance, None)
        gradients.x_backprop

`bngrad.aio.Client` is the same client for asyncio.
"""

from __future__ import annotations

from bngrad import aio, typing
from bngrad._ahead.tensor import AheadTensor
from bngrad._client import Client
from bngrad._credentials import Tls
from bngrad._errors import (
    BngradError,
    ClientClosedError,
    DeadlineExceededError,
    FieldViolation,
    InternalError,
    InvalidArgumentError,
    NotSharedError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
)
from bngrad._results import (
    BatchNormTrainingBackprop,
    Device,
    FusedBatchNormGradGrad,
    FusedBatchNormGradV2,
    FusedBatchNormGradV3,
    ServerInfo,
)
from bngrad_wire import __version__

__all__ = [
    "AheadTensor",
    "BatchNormTrainingBackprop",
    "BngradError",
    "Client",
    "ClientClosedError",
    "DeadlineExceededError",
    "Device",
    "FieldViolation",
    "FusedBatchNormGradGrad",
    "FusedBatchNormGradV2",
    "FusedBatchNormGradV3",
    "InternalError",
    "InvalidArgumentError",
    "NotSharedError",
    "ResourceExhaustedError",
    "ServerInfo",
    "Tls",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
    "__version__",
    "aio",
    "typing",
]

# Tracebacks name errors as users import them.
for _public in list(vars().values()):
    if isinstance(_public, type) and issubclass(_public, BngradError):
        _public.__module__ = __name__
del _public
