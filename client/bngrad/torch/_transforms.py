"""What ``torch.func`` needs of the operators: gradients in its transforms, and rules by which it maps them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from bngrad.torch import _ops

_functorch = torch._C._functorch


def is_transformed() -> bool:
    """Returns whether a transform of ``torch.func`` runs."""
    return _functorch.peek_interpreter_stack() is not None


def needs_jvp() -> bool:
    """Returns whether forward-mode differentiation runs, for which a client has no formula."""
    return forward_ad._current_level >= 0


def has_memory(x: Tensor) -> bool:
    """Returns whether a tensor has values in memory: those of transforms, and of batched gradients, have none."""
    return not (_functorch.is_functorch_wrapped_tensor(x) or _functorch.is_legacy_batchedtensor(x))


class FirstOrder(torch.autograd.Function):
    """`bngrad.torch.batch_norm_grad` for transforms, which do not take the autograd of PyTorch's custom operators."""

    generate_vmap_rule = True
    setup_context = staticmethod(_ops.save)

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Computes the first order."""
        found: tuple[Tensor, Tensor, Tensor] = _ops.batch_norm_grad(*arguments)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Computes the second order."""
        return _ops.second_order(ctx, SecondOrder.apply, grads)


class SecondOrder(torch.autograd.Function):
    """`bngrad.torch.batch_norm_grad_grad`, likewise."""

    generate_vmap_rule = True
    backward = staticmethod(_ops.refuse_third_order)

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Computes the second order."""
        found: tuple[Tensor, Tensor, Tensor] = _ops.batch_norm_grad_grad(*arguments)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Saves nothing."""


def _map(op: Any) -> None:
    """Lets a mapped operator be one call: the mapped dimension becomes a part of the channels."""

    @op.register_vmap  # type: ignore[untyped-decorator]
    def _(info: Any, dims: tuple[int | None, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        merged = [
            _merged(each, dim, info.batch_size) if isinstance(each, Tensor) else each
            for each, dim in zip(arguments, dims, strict=True)
        ]
        outputs = op(*merged)
        channels = tuple(0 if each.dim() == 1 else 1 for each in outputs)
        split = (each.unflatten(dim, (info.batch_size, -1)) for each, dim in zip(outputs, channels, strict=True))
        return tuple(split), channels


def _merged(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    tensor = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return tensor.flatten() if tensor.dim() == 2 else tensor.movedim(0, 1).flatten(1, 2)


_map(_ops.batch_norm_grad)
_map(_ops.batch_norm_grad_grad)
