"""What ``torch.func``, batched gradients and forward mode make of the layers, against the same of PyTorch's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.integration.pytorch.models import CHANNELS, MEMORY_FORMATS, OURS, randomised, tensors
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.functional import jacobian
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

import bngrad
import bngrad.torch

Transform = Callable[[Callable[..., Tensor], Tensor, dict[str, Tensor]], Any]


def loss_of(layer: _BatchNorm) -> Callable[..., Tensor]:
    """Returns the loss of a layer as a function of its input and parameters."""

    def loss(x: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        y: Tensor = functional_call(layer, parameters, (x,))
        return (y.pow(3) * torch.linspace(-1, 1, y[0].numel()).view_as(y[0])).sum()

    return loss


def batched(x: Tensor, dim: int = 0) -> Tensor:
    return torch.stack([x, x.flip(0) + 1, x * x], dim)


def of_a_batch_of_gradients(loss: Callable[..., Tensor], x: Tensor, parameters: dict[str, Tensor]) -> Any:
    inputs = [x.clone().requires_grad_(), *(each.clone().requires_grad_() for each in parameters.values())]
    value = loss(inputs[0], dict(zip(parameters, inputs[1:], strict=True)))
    return torch.autograd.grad(value, inputs, torch.tensor([1.0, 2.0, -1.0]), is_grads_batched=True)


def in_forward_mode(loss: Callable[..., Tensor], x: Tensor, parameters: dict[str, Tensor]) -> Any:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x.cos())  # type: ignore[no-untyped-call]
        return tuple(forward_ad.unpack_dual(loss(dual, parameters)))  # type: ignore[no-untyped-call]


def compiled(transform: Callable[..., Any]) -> Callable[..., Any]:
    torch.compiler.reset()
    return torch.compile(transform, backend="aot_eager", fullgraph=True)


REVERSE: dict[str, Transform] = {
    "grad": lambda loss, *inputs: grad(loss, (0, 1))(*inputs),
    "vjp": lambda loss, *inputs: vjp(loss, *inputs)[1](torch.tensor(2.0)),
    "vmap of the input": lambda loss, x, parameters: vmap(grad(loss, (0, 1)), (0, None))(batched(x), parameters),
    "vmap of another dimension": lambda loss, x, parameters: vmap(grad(loss), (2, None))(batched(x, 2), parameters),
    "vmap of the parameters": lambda loss, x, parameters: vmap(grad(loss, (0, 1)), (None, 0))(
        x, {name: batched(each) for name, each in parameters.items()}
    ),
    "vmap of vmap": lambda loss, x, parameters: vmap(vmap(grad(loss), (0, None)), (0, None))(
        batched(batched(x)), parameters
    ),
    "vmap without a gradient": lambda loss, x, parameters: vmap(loss, (0, None))(batched(x), parameters),
    "grad of vmap": lambda loss, x, parameters: grad(
        lambda parameters: vmap(loss, (0, None))(batched(x), parameters).square().sum()
    )(parameters),
    "jacrev": lambda loss, x, parameters: jacrev(grad(loss), (0, 1))(x, parameters),
    "grad of grad": lambda loss, *inputs: grad(lambda *inputs: grad(loss)(*inputs).pow(2).sum(), (0, 1))(*inputs),
    "vmap of grad of grad": lambda loss, x, parameters: vmap(
        grad(lambda x, parameters: grad(loss)(x, parameters).pow(2).sum(), (0, 1)), (0, None)
    )(batched(x), parameters),
    "jacobian": lambda loss, x, parameters: jacobian(  # type: ignore[no-untyped-call]
        lambda x: loss(x, parameters), x, vectorize=True
    ),
    "batched gradients": of_a_batch_of_gradients,
}
COMPILED: dict[str, Transform] = {
    "grad, compiled": lambda loss, *inputs: compiled(grad(loss, (0, 1)))(*inputs),
    "vmap, compiled": lambda loss, x, parameters: compiled(vmap(grad(loss), (0, None)))(batched(x), parameters),
}
FORWARD: dict[str, Transform] = {
    "jvp": lambda loss, x, parameters: jvp(lambda x: loss(x, parameters), (x,), (x.cos(),)),
    "jacfwd": lambda loss, *inputs: jacfwd(loss)(*inputs),
    "hessian": lambda loss, *inputs: hessian(loss)(*inputs),
    "forward mode": in_forward_mode,
}


ignore_pytorchs_warnings = pytest.mark.filterwarnings("ignore")  # of its forward mode and compiler


def of_transforms(transforms: dict[str, Transform]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("transform", transforms.values(), ids=transforms.keys())


def check(
    client: bngrad.Client, rank: str, memory_format: torch.memory_format, transform: Transform, training: bool
) -> None:
    """Has no running statistics in training: ``vmap`` refuses to update them, of PyTorch's layers too."""
    ours = randomised(OURS[rank](CHANNELS, track_running_stats=not training, client=client)).train(training)
    stock = bngrad.torch.revert_batchnorm(copy.deepcopy(ours))
    x, _ = tensors(rank, memory_format)
    parameters = {name: each.detach() for name, each in ours.named_parameters()}
    found, expected = (transform(loss_of(layer), x, parameters) for layer in (ours, stock))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@ignore_pytorchs_warnings
@pytest.mark.parametrize("training", [True, False])
@of_transforms(REVERSE | FORWARD)
@pytest.mark.parametrize(("rank", "memory_format"), MEMORY_FORMATS, ids=str)
def test_transforms_are_those_of_pytorchs_layers(
    client: bngrad.Client, rank: str, memory_format: torch.memory_format, transform: Transform, training: bool
) -> None:
    check(client, rank, memory_format, transform, training)


@ignore_pytorchs_warnings
@of_transforms(COMPILED)
def test_compiled_transforms_are_those_of_pytorchs_layers(client: bngrad.Client, transform: Transform) -> None:
    check(client, "4d", torch.contiguous_format, transform, training=True)


@ignore_pytorchs_warnings
@of_transforms({name: REVERSE[name] for name in REVERSE if name != "vmap without a gradient"})
def test_the_client_computes_gradients_of_transforms(transform: Transform) -> None:
    with bngrad.Client("local:") as client:
        layer = OURS["2d"](CHANNELS, track_running_stats=False, client=client)
    with pytest.raises(bngrad.ClientClosedError):
        transform(loss_of(layer), tensors("2d", torch.contiguous_format)[0], dict(layer.named_parameters()))


@ignore_pytorchs_warnings
@of_transforms(FORWARD | COMPILED)
def test_pytorch_computes_forward_mode_and_compiled_transforms(transform: Transform) -> None:
    with bngrad.Client("local:") as client:
        layer = OURS["2d"](CHANNELS, track_running_stats=False, client=client)
    transform(loss_of(layer), tensors("2d", torch.contiguous_format)[0], dict(layer.named_parameters()))


@pytest.mark.parametrize("number", [1, 5])
def test_a_mapped_gradient_is_one_call(client: bngrad.Client, number: int) -> None:
    calls = []

    class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(str(function))
            return function(*args, **(kwargs or {}))

    layer = OURS["2d"](CHANNELS, track_running_stats=False, client=client)
    x = tensors("2d", torch.contiguous_format)[0].expand(number, -1, -1)
    with Watching():  # type: ignore[no-untyped-call]
        vmap(grad(lambda x: layer(x).pow(3).sum()))(x)
    assert calls.count("bngrad.batch_norm_grad.default") == 1


def test_the_third_order_is_refused(client: bngrad.Client) -> None:
    layer = OURS["2d"](CHANNELS, track_running_stats=False, client=client)

    def once(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: grad(function)(x).pow(2).sum()

    with pytest.raises(NotImplementedError, match="no gradients of the third order"):
        grad(once(once(lambda x: layer(x).pow(3).sum())))(tensors("2d", torch.contiguous_format)[0])
