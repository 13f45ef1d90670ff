"""The layers and autograd: the forward pass is PyTorch's kernel; a client, or PyTorch, computes the backward pass."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from bngrad.torch._ahead import SentInput
from bngrad.torch._clients import is_cold
from bngrad.torch._ops import batch_norm_grad, gradients
from bngrad.torch._placement import Placement
from bngrad.torch._transforms import FirstOrder, has_memory, is_transformed

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]

_NOT_SENT = nullcontext()
_NO_GRADIENTS = (None,) * 8


class Function(torch.autograd.Function):
    """Normalises by PyTorch's own kernel; the backward pass is `batch_norm_grad`, or PyTorch's where that is faster.

    The place is chosen in the backward pass: a checkpoint repeats the forward pass, which must save the same tensors.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
        is_training: bool, momentum: float, epsilon: float, client: str, sent: SentInput | None,
        placement: Placement | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        # As torch.batch_norm does, so with cuDNN where that would take it: its bits are others.
        y, mean, rstd, _, _ = torch._batch_norm_impl_index(
            x, weight, bias, running_mean, running_var, is_training, momentum, epsilon, torch.backends.cudnn.enabled
        )
        if not is_training:
            assert running_mean is not None
            assert running_var is not None
            mean, rstd = running_mean.clone(), torch.rsqrt(running_var.float() + epsilon)
        return y, mean, rstd

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        x, weight, _, _, running_var, ctx.is_training, _, ctx.epsilon, ctx.client, ctx.sent, ctx.placement = inputs
        _, mean, rstd = output
        ctx.mark_non_differentiable(mean, rstd)
        if ctx.placement is not None:
            ctx.placement.begin(ctx)
        variance = None if ctx.placement is None or ctx.is_training else running_var.clone()
        ctx.save_for_backward(x, weight, mean, rstd, variance)

    @staticmethod
    def backward(ctx: Any, *y_backprop: Tensor) -> tuple[Tensor | None, ...]:
        saved, placement = ctx.saved_tensors, ctx.placement
        if placement is None:
            found = _by_client(ctx, saved, y_backprop[0])
        else:
            found = placement.compute(
                ctx,
                by_client=lambda: _by_client(ctx, saved, y_backprop[0]),
                by_pytorch=lambda: _by_pytorch(ctx, saved, y_backprop[0]),
                is_server_cold=lambda: is_cold(ctx.client),
            )
        return *found, *_NO_GRADIENTS


def _by_client(ctx: Any, saved: tuple[Any, ...], y_backprop: Tensor) -> Gradients:
    x, weight, mean, rstd, _ = saved
    if all(map(_is_plain, (x, y_backprop, mean))):
        compute = gradients
    else:
        compute = FirstOrder.apply if not torch.compiler.is_compiling() and is_transformed() else batch_norm_grad
    with _NOT_SENT if ctx.sent is None else ctx.sent.used(x):
        x_backprop, scale_backprop, offset_backprop = compute(
            y_backprop, x, weight, mean, rstd, ctx.epsilon, ctx.is_training, ctx.client
        )
    _, weight_needs_gradient, bias_needs_gradient, *_ = ctx.needs_input_grad
    # Autograd gives them the parameters' dtypes.
    return (
        x_backprop,
        scale_backprop if weight_needs_gradient else None,
        offset_backprop if bias_needs_gradient else None,
    )


def _by_pytorch(ctx: Any, saved: tuple[Any, ...], y_backprop: Tensor) -> Gradients:
    x, weight, mean, rstd, variance = saved
    statistics = (None, None, mean, rstd) if ctx.is_training else (mean, variance, None, None)
    found: Gradients = torch.ops.aten.native_batch_norm_backward(
        y_backprop, x, weight, *statistics, ctx.is_training, ctx.epsilon, ctx.needs_input_grad[:3]
    )
    return found


class EagerFunction(Function):
    """Does what `Function` does, without ``setup_context``, which PyTorch's compiler needs.

    For a class that has it, ``apply`` inspects the signature of ``forward`` at each call, which takes 40 µs.
    """

    setup_context = staticmethod(torch.autograd.Function.setup_context)

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        output = Function.forward(*inputs)
        Function.setup_context(ctx, inputs, output)
        return output


def _is_plain(x: Tensor) -> bool:
    """Returns whether nothing but the values of the gradient is asked for: no graph, and no tensors without values.

    The dispatcher takes longer than a small gradient, and its first call of an operator imports PyTorch's compiler.
    """
    is_traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
    return type(x) is Tensor and not is_traced and not torch.is_grad_enabled() and not x.is_meta and has_memory(x)
