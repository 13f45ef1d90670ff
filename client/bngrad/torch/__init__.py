"""PyTorch's batch normalisation, whose backward pass a bngrad client computes.

    model = bngrad.torch.convert_batchnorm(model, bngrad.Client("localhost:50051"))

The forward pass is PyTorch's own, so its bits and the running statistics are PyTorch's.
"""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError("bngrad.torch needs PyTorch: pip install '.[torch]' in a checkout of bngrad") from error

from bngrad.torch._modules import BatchNorm1d, BatchNorm2d, BatchNorm3d, convert_batchnorm, revert_batchnorm
from bngrad.torch._ops import batch_norm_grad, batch_norm_grad_grad

__all__ = [
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "batch_norm_grad",
    "batch_norm_grad_grad",
    "convert_batchnorm",
    "revert_batchnorm",
]
