"""Tensors of any memory layout in the layers and operators of bngrad.torch."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from tests.integration.pytorch.models import CHANNELS, OURS, TOLERANCES, assert_close, gradients, randomised, tensors
from torch import Tensor
from torch.func import functional_call

import bngrad
import bngrad.torch
from bngrad.torch._clients import ClientReference

ODD_LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "expanded": lambda: torch.randn(1, CHANNELS, 1, 1).expand(4, -1, 3, 2),
    "transposed": lambda: torch.randn(4, CHANNELS, 2, 3).transpose(2, 3),
    "sliced": lambda: torch.randn(8, CHANNELS, 3, 2)[::2],
    "channels last": lambda: torch.randn(4, CHANNELS, 3, 2).to(memory_format=torch.channels_last),
    "conjugated": lambda: torch.randn(4, CHANNELS, 3, 2, dtype=torch.complex64).conj().imag,
}


@pytest.mark.parametrize("x", ODD_LAYOUTS)
@pytest.mark.parametrize("y_backprop", ODD_LAYOUTS)
def test_tensors_of_any_memory_layout_are_taken(client: bngrad.Client, x: str, y_backprop: str) -> None:
    ours = randomised(OURS["4d"](CHANNELS, client=client)).eval()
    stock = bngrad.torch.revert_batchnorm(copy.deepcopy(ours)).double()
    given = ODD_LAYOUTS[x](), ODD_LAYOUTS[y_backprop]()
    found = gradients(ours, *given)[1]
    assert_close(found, gradients(stock, given[0].double(), given[1].double())[1], 2e-6)


def sequences() -> Tensor:
    """Returns sequences as transformers have them, with the channels next to each other in memory."""
    return torch.randn(4, 5, CHANNELS).transpose(1, 2)


def test_sequences_with_the_channels_last_have_gradients_that_lie_as_they_do(client: bngrad.Client) -> None:
    ours = randomised(OURS["3d"](CHANNELS, client=client))
    exact = bngrad.torch.revert_batchnorm(copy.deepcopy(ours)).double()
    x, y_backprop = sequences(), sequences()
    found = gradients(ours, x, y_backprop)[1]
    assert_close(found, gradients(exact, x.double(), y_backprop.double())[1], TOLERANCES[torch.float32])
    assert found[0].stride() == x.stride()


@pytest.mark.parametrize("make", [*ODD_LAYOUTS.values(), sequences], ids=[*ODD_LAYOUTS, "sequences"])
def test_a_compiler_is_told_how_gradients_lie(client: bngrad.Client, make: Callable[[], Tensor]) -> None:
    name = ClientReference(client).name
    given = make(), make(), None, *torch.rand(2, CHANNELS), 1e-5, True, name
    torch.library.opcheck(bngrad.torch.batch_norm_grad, given, test_utils="test_faketensor")
    second = make(), *torch.rand(2, CHANNELS), *given
    torch.library.opcheck(bngrad.torch.batch_norm_grad_grad, second, test_utils="test_faketensor")


@pytest.mark.parametrize("target", ["server", "local"])
def test_a_weight_may_have_gaps(client: bngrad.Client, target: str) -> None:
    weight = torch.rand(2 * CHANNELS)[::2].requires_grad_()
    x, y_backprop = tensors("4d", torch.contiguous_format)

    def gradient(client: bngrad.Client, weight: Tensor) -> Tensor:
        y = functional_call(OURS["4d"](CHANNELS, client=client), {"weight": weight}, (x.requires_grad_(),))
        return torch.autograd.grad(y, x, y_backprop)[0]

    with bngrad.Client("local:") as local:
        chosen = {"server": client, "local": local}[target]
        assert torch.equal(gradient(chosen, weight), gradient(chosen, weight.detach().clone()))
