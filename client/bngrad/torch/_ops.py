"""The operators ``bngrad::batch_norm_grad`` and ``bngrad::batch_norm_grad_grad``: calls of a client, for autograd."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from bngrad.torch import _ahead, _clients, _layout, _local
from bngrad.typing import Array, DataFormat

# A CUDA graph would repeat the kernels of a call, but not the call. Older versions of PyTorch cannot be told.
_TAGS: dict[str, Any] = {"tags": (torch.Tag.cudagraph_unsafe,)} if hasattr(torch.Tag, "cudagraph_unsafe") else {}


def gradients(
    y_backprop: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, epsilon: float,
    is_training: bool, client: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Does what `batch_norm_grad` does, without PyTorch's dispatcher, for tensors that nothing traces."""
    found = _clients.find(client)
    if (kernels := found._calls.local) is not None:
        found._calls.check_open()
        computed = _local.gradients(kernels, y_backprop, x, weight, mean, rstd, epsilon, is_training)
        if computed is not None:
            return computed
    channels_last = _layout.has_channels_last(x)
    y4, x4 = _layout.for_client((y_backprop, x), channels_last=channels_last)
    outputs = found.fused_batch_norm_grad_v3(
        y4, _ahead.sent(x4), _scale(weight, x), _layout.vector(mean), _layout.vector(rstd), None,
        epsilon, _data_format(channels_last), is_training,
        reserve_space_2_kind="inverse_std", out=_layout.output_like(x4, x),
    )  # fmt: skip
    x_backprop = _layout.from_client(outputs.x_backprop, x, channels_last=channels_last)
    scale_backprop, offset_backprop = map(torch.from_numpy, outputs[1:3])
    if x.is_cpu:
        return x_backprop, scale_backprop, offset_backprop
    return x_backprop, scale_backprop.to(x.device), offset_backprop.to(x.device)


@torch.library.custom_op("bngrad::batch_norm_grad", mutates_args=(), **_TAGS)
def batch_norm_grad(
    y_backprop: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    epsilon: float,
    is_training: bool,
    client: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of batch normalisation with `bngrad.Client.fused_batch_norm_grad_v3`.

    Args:
        y_backprop: The gradient of the output; dtype and shape of x.
        x: The input of the forward pass; float16, bfloat16 or float32, shape (N, C, ...), 2-D to 5-D.
        weight: Gamma, shape (C,); None for ones.
        mean: The mean that the forward pass subtracted, shape (C,).
        rstd: What it multiplied with, ``1 / sqrt(variance + epsilon)``, shape (C,).
        epsilon: Added to the variance; used by the second order alone.
        is_training: Whether mean and rstd were computed from x.
        client: The name of a client.

    Returns:
        The gradient of x, with its dtype and shape, and those of weight and bias, float32.
    """
    return gradients(y_backprop, x, weight, mean, rstd, epsilon, is_training, client)


@torch.library.custom_op("bngrad::batch_norm_grad_grad", mutates_args=(), **_TAGS)
def batch_norm_grad_grad(
    grad_x_backprop: Tensor,
    grad_scale_backprop: Tensor,
    grad_offset_backprop: Tensor,
    y_backprop: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    epsilon: float,
    is_training: bool,
    client: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of `batch_norm_grad` with `bngrad.Client.fused_batch_norm_grad_grad`.

    Args:
        grad_x_backprop: The gradient of the first output of `batch_norm_grad`; dtype and shape of x.
        grad_scale_backprop: That of the second output, shape (C,).
        grad_offset_backprop: That of the third output, shape (C,).
        y_backprop: As in `batch_norm_grad`, and so are the other arguments.
        x: The input of the forward pass.
        weight: Gamma; None for ones.
        mean: The mean; used without ``is_training`` alone.
        rstd: Likewise.
        epsilon: Added to the variance.
        is_training: Whether mean and rstd were computed from x.
        client: The name of a client.

    Returns:
        The gradients of y_backprop and x, with their dtype and shape, and that of weight, float32.
    """
    channels_last = _layout.has_channels_last(x)
    large = _layout.for_client((grad_x_backprop, y_backprop, x), channels_last=channels_last)
    out = (_layout.output_like(large[2], x), _layout.output_like(large[2], x))
    gradients = _clients.find(client).fused_batch_norm_grad_grad(
        large[0], _layout.vector(grad_scale_backprop), _layout.vector(grad_offset_backprop), large[1], large[2],
        _scale(weight, x), _layout.vector(mean), _layout.vector(rstd),
        epsilon, _data_format(channels_last), is_training, reserve_space_2_kind="inverse_std", out=out,
    )  # fmt: skip
    grad_y_backprop, grad_x = (
        _layout.from_client(gradient, x, channels_last=channels_last) for gradient in gradients[:2]
    )
    return grad_y_backprop, grad_x, torch.from_numpy(gradients.grad_scale).to(x.device)


@batch_norm_grad.register_fake
def _(y_backprop: Tensor, x: Tensor, *others: object) -> tuple[Tensor, Tensor, Tensor]:
    return _layout.empty_result(x), _per_channel(x), _per_channel(x)


@batch_norm_grad_grad.register_fake
def _(
    of_x: Tensor, of_scale: Tensor, of_offset: Tensor, y_backprop: Tensor, x: Tensor, *others: object
) -> tuple[Tensor, Tensor, Tensor]:
    return _layout.empty_result(x), _layout.empty_result(x), _per_channel(x)


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, ctx.epsilon, ctx.is_training, ctx.client = inputs
    ctx.save_for_backward(*tensors)


def second_order(ctx: Any, compute: Any, grads: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    y_backprop, x, weight, mean, rstd = ctx.saved_tensors
    grad_y_backprop, grad_x, grad_scale = compute(
        *grads, y_backprop, x, weight, mean, rstd, ctx.epsilon, ctx.is_training, ctx.client
    )
    return grad_y_backprop, grad_x, None if weight is None else grad_scale, None, None, None, None, None


def _backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    return second_order(ctx, batch_norm_grad_grad, grads)


def refuse_third_order(ctx: Any, *grads: Tensor) -> None:
    raise NotImplementedError(
        "bngrad.torch has no gradients of the third order, which torch.autograd.functional.hvp needs as well: vhp "
        "gives the same, since a Hessian is symmetric; or revert_batchnorm lets PyTorch compute them"
    )


batch_norm_grad.register_autograd(_backward, setup_context=save)
batch_norm_grad_grad.register_autograd(refuse_third_order)


def _scale(weight: Tensor | None, x: Tensor) -> Array:
    if weight is None:
        return np.ones(x.shape[1], np.float32)
    return _layout.copied_vector(weight)  # FSDP resizes the memory of weights


def _per_channel(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[1], dtype=torch.float32)


def _data_format(channels_last: bool) -> DataFormat:
    return "NHWC" if channels_last else "NCHW"
