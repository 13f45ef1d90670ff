"""Tensors of PyTorch, as arguments and as outputs, over every transport."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import bngrad

SHAPE = (4, 8, 5, 6)


def tensors(dtype: torch.dtype, memory_format: torch.memory_format) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    large = [torch.randn(SHAPE, generator=generator).to(dtype).to(memory_format=memory_format) for _ in range(2)]
    return [*large, *(torch.rand(SHAPE[1], generator=generator) + 0.5 for _ in range(3))]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_results_are_written_to_tensors(
    client: bngrad.Client, dtype: torch.dtype, memory_format: torch.memory_format
) -> None:
    y_backprop, x, scale, mean, variance = tensors(dtype, memory_format)
    out = torch.empty_like(x)
    given = client.fused_batch_norm_grad_v2(y_backprop, x, scale, mean, variance, data_format="NCHW", out=out)
    made = client.fused_batch_norm_grad_v2(y_backprop, x, scale, mean, variance, data_format="NCHW")
    assert made.x_backprop.shape == SHAPE
    as_written = torch.from_numpy(made.x_backprop.view(np.int16 if dtype.itemsize == 2 else np.int32)).view(dtype)
    assert torch.equal(out, as_written)
    for ours, theirs in zip(given, made, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_channels_last_gives_the_bits_of_nhwc(client: bngrad.Client) -> None:
    y_backprop, x, scale, mean, variance = tensors(torch.float32, torch.channels_last)
    second = client.fused_batch_norm_grad_v2(y_backprop, x, scale, mean, variance, data_format="NCHW")
    nhwc = [tensor.permute(0, 2, 3, 1) for tensor in (y_backprop, x)]
    last = client.fused_batch_norm_grad_v2(nhwc[0], nhwc[1], scale, mean, variance)
    np.testing.assert_array_equal(np.moveaxis(second.x_backprop, 1, -1), last.x_backprop)
    for ours, theirs in zip(second[1:], last[1:], strict=True):
        np.testing.assert_array_equal(ours, theirs)
