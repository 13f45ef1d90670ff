"""Lets a server compute the gradient of PyTorch's batch norm.

python examples/pytorch_gradient.py localhost:50051
"""

from __future__ import annotations

import sys
from typing import Any

import torch

import bngrad


class BatchNorm2d(torch.nn.BatchNorm2d):
    """Batch norm in training, whose backward pass is a call of the client."""

    def __init__(self, channels: int, client: bngrad.Client, **options: Any) -> None:
        super().__init__(channels, **options)
        self._client = client

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _BatchNorm.apply(x, self.weight, self.bias, self.eps, self._client)  # type: ignore[no-untyped-call]
        return result


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, epsilon: float, client: bngrad.Client) -> Any:
        y, mean, inverse_std = torch.native_batch_norm(x, weight, bias, None, None, True, 0.1, epsilon)
        ctx.save_for_backward(x, weight, mean, inverse_std)
        ctx.client = client
        return y

    @staticmethod
    def backward(ctx: Any, *y_backprop: Any) -> Any:
        x, weight, mean, inverse_std = ctx.saved_tensors
        x_backprop = torch.empty_like(x)  # of x's dtype, bfloat16 too, and memory format, channels_last too
        gradients = ctx.client.fused_batch_norm_grad_v3(
            y_backprop[0], x, weight, mean, inverse_std, None,
            data_format="NCHW", reserve_space_2_kind="inverse_std", out=x_backprop,
        )  # fmt: skip
        scale_backprop, offset_backprop = map(torch.from_numpy, gradients[1:3])
        return x_backprop, scale_backprop, offset_backprop, None, None


def main(target: str) -> None:
    torch.manual_seed(0)
    with bngrad.Client(target) as client:
        ours, theirs = BatchNorm2d(64, client), torch.nn.BatchNorm2d(64)
        for dtype in (torch.float32, torch.bfloat16):
            for memory_format in (torch.contiguous_format, torch.channels_last):
                data = torch.randn(32, 64, 28, 28).to(dtype).to(memory_format=memory_format)
                gradients = []
                for layer in (ours, theirs):
                    x = data.clone().requires_grad_()
                    layer.zero_grad()
                    (layer(x).float() ** 3).sum().backward()
                    assert x.grad is not None
                    gradients.append(x.grad.float())
                difference = (gradients[0] - gradients[1]).abs().max() / gradients[1].abs().max()
                print(f"{dtype}, {memory_format}: differs from PyTorch's by {difference:.1e} of the largest value")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
