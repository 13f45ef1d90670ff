"""Layers of batch normalisation, and their exchange with PyTorch's in a model."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bngrad._client import Client, check_client
from bngrad.torch._ahead import Inputs
from bngrad.torch._clients import ClientReference
from bngrad.torch._function import EagerFunction, Function
from bngrad.torch._placement import Placement, Placements
from bngrad.torch._transforms import is_transformed, needs_jvp

Model = TypeVar("Model", bound=nn.Module)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PER_CHANNEL = ("running_mean", "running_var", "weight", "bias")
_LARGEST_EPS = torch.finfo(torch.float32).max


class _ClientBatchNorm(_BatchNorm):
    """What the layers have in common: a client, and its use in the backward pass."""

    _client = ClientReference()
    _placement: Placement | None = None
    _inputs = Inputs()

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        client: Client | None = None,
    ) -> None:
        """Makes a layer as PyTorch's class does.

        Args:
            num_features: The number of channels, C.
            eps: Added to the variance.
            momentum: The weight of a batch in the running statistics; None for a plain average.
            affine: Whether the layer has a weight and a bias.
            track_running_stats: Whether the layer keeps a running mean and variance.
            device: Where its tensors are.
            dtype: Their dtype.
            bias: Whether an affine layer has a bias; False needs a PyTorch that knows this argument.
            client: What computes the backward pass; None for PyTorch.
        """
        options = {} if bias else {"bias": bias}
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, **options)
        self._client = ClientReference(client)
        self._inputs = Inputs()

    @property
    def client(self) -> Client | None:
        """The client that computes the backward pass; None if PyTorch does, as in a layer that was unpickled."""
        return self._client.client

    def extra_repr(self) -> str:
        """Returns what PyTorch prints of the layer, and its client."""
        text = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{text}, client={self.client!r}" if self._client.name else str(text)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - PyTorch's name
        """Normalises as PyTorch's layer does.

        Args:
            input: float32, bfloat16 or float16, of the number of dimensions that PyTorch's layer takes.

        Raises:
            TypeError: A gradient is needed of an input of another dtype.
            ValueError: As PyTorch's layer raises.
        """
        if not self._client.name or not self._needs_gradient(input) or input.numel() == 0 or input.is_mkldnn:
            return super().forward(input)
        if needs_jvp():
            return super().forward(input)
        placement = self._placement
        if not torch.compiler.is_compiling() and placement is not None and placement.is_left_to_pytorch:
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        if input.dtype not in _DTYPES:
            expected = "float32, bfloat16 or float16"
            raise TypeError(f"the input of {type(self).__name__} must have dtype {expected}, not {input.dtype}")
        return self._normalise(input)

    def _needs_gradient(self, x: Tensor) -> bool:
        if x.requires_grad or not torch.is_grad_enabled():
            return torch.is_grad_enabled()
        if hasattr(self, "parametrizations"):  # which compute, and may draw random numbers, at each access
            return True
        return any(parameter is not None and parameter.requires_grad for parameter in (self.weight, self.bias))

    def _check(self, x: Tensor, is_training: bool, per_channel: Sequence[Tensor | None]) -> None:
        """Refuses what ``torch.nn.functional.batch_norm`` refuses, in its words; PyTorch's kernel checks no sizes."""
        channels = x.shape[1]
        if is_training and x.numel() == channels:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.size()}")
        if is_training and self.eps <= 0.0:
            raise ValueError(f"batch_norm eps must be positive during training, but got {self.eps}")
        if self.eps < 0.0:
            raise ValueError(f"batch_norm eps must be non-negative, but got {self.eps}")
        if not self.eps <= _LARGEST_EPS:
            raise ValueError(f"eps must be finite in float32 for a client to compute gradients, but got {self.eps}")
        for name, values in zip(_PER_CHANNEL, per_channel, strict=True):
            if values is not None and values.numel() != channels:
                raise RuntimeError(f"{name} should contain {channels} elements not {values.numel()}")
            if values is not None and values.requires_grad and name.startswith("running"):
                raise RuntimeError(
                    f"{name} must not require a gradient: batch_norm is not differentiable with respect to it"
                )

    def _normalise(self, x: Tensor) -> Tensor:
        """Does what PyTorch's ``_BatchNorm.forward`` does."""
        is_training = self.training or self.running_mean is None
        keeps_statistics = not self.training or self.track_running_stats
        running_mean, running_var = (self.running_mean, self.running_var) if keeps_statistics else (None, None)
        weight, bias = self.weight, self.bias
        self._check(x, is_training, (running_mean, running_var, weight, bias))
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        is_eager = not torch.compiler.is_compiling() and not is_transformed()
        placement = self._placement if is_eager else None
        client = self._client.client if placement is None or placement.next_by_client() else None
        sent = self._inputs.send(client, x, is_training=is_training) if is_eager else None
        function = EagerFunction if is_eager else Function
        y, _, _ = function.apply(  # type: ignore[no-untyped-call]
            x, weight, bias, running_mean, running_var,
            is_training, factor, self.eps, self._client.name, sent, placement,
        )  # fmt: skip
        result: Tensor = y
        return result


class BatchNorm1d(_ClientBatchNorm, nn.BatchNorm1d):
    """``torch.nn.BatchNorm1d`` whose backward pass a client computes; 2-D or 3-D inputs."""


class BatchNorm2d(_ClientBatchNorm, nn.BatchNorm2d):
    """``torch.nn.BatchNorm2d`` whose backward pass a client computes; 4-D inputs."""


class BatchNorm3d(_ClientBatchNorm, nn.BatchNorm3d):
    """``torch.nn.BatchNorm3d`` whose backward pass a client computes; 5-D inputs."""


_OURS: dict[type[nn.Module], type[_ClientBatchNorm]] = {
    nn.BatchNorm1d: BatchNorm1d,
    nn.BatchNorm2d: BatchNorm2d,
    nn.BatchNorm3d: BatchNorm3d,
}
_STOCK: dict[type[nn.Module], type[nn.Module]] = {ours: stock for stock, ours in _OURS.items()}


def convert_batchnorm(
    model: Model, client: Client, *, where: Literal["everywhere", "measured"] = "everywhere"
) -> Model:
    """Lets a client compute the backward passes of a model's batch normalisations.

    Layers of exactly PyTorch's classes BatchNorm1d, BatchNorm2d and BatchNorm3d become those of this module, and layers
    that already are get the client. They change their class and stay the same objects, so parameters, buffers, hooks,
    optimisers and the names in a ``state_dict`` stay valid. Other layers, subclasses among them, stay as they are.

    Args:
        model: The model, or a layer; it is changed in place.
        client: The client, which must be open while backward passes run.
        where: "everywhere", or "measured": each layer's first ten backward passes are computed by PyTorch and by the
            client in turns, and from then on by the client if it took less than 0.9 of PyTorch's time, else by PyTorch.
            The choices are printed to stderr once.

    Returns:
        The model.

    Raises:
        TypeError: The client is no `bngrad.Client`, or the model no ``torch.nn.Module``.
        ValueError: ``where`` is neither.

    Warns:
        UserWarning: The model has no such layer.
    """
    if where not in ("everywhere", "measured"):
        raise ValueError(f"where must be 'everywhere' or 'measured', not {where!r}")
    check_client(client)
    _check_model(model)
    reference, placements = ClientReference(client), Placements()
    for name, module in model.named_modules():
        if type(module) in _OURS:
            module.__class__ = _OURS[type(module)]
        if isinstance(module, _ClientBatchNorm):
            module._client = reference
            module._inputs = Inputs()
            module._placement = placements.add(name or type(module).__name__) if where == "measured" else None
    if not any(isinstance(module, _ClientBatchNorm) for module in model.modules()):
        expected = "torch.nn.BatchNorm1d, BatchNorm2d or BatchNorm3d; subclasses stay as they are"
        warnings.warn(f"convert_batchnorm changed nothing: the model has no {expected}", stacklevel=2)
    return model


def revert_batchnorm(model: Model) -> Model:
    """Undoes `convert_batchnorm`: the layers become PyTorch's again, in place.

    Subclasses of this module's layers, as which PyTorch parametrises them too, keep their class and lose their client.

    Args:
        model: The model, or a layer.

    Returns:
        The model.

    Raises:
        TypeError: The model is no ``torch.nn.Module``.
    """
    _check_model(model)
    for module in model.modules():
        if isinstance(module, _ClientBatchNorm):
            for name in ("_client", "_inputs", "_placement"):
                module.__dict__.pop(name, None)
        if type(module) in _STOCK:
            module.__class__ = _STOCK[type(module)]
    return model


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {model!r}")
