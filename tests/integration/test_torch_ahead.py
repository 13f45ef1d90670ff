"""Inputs of PyTorch's layers that are sent ahead of their backward passes, to a server on another host."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.monitoring.conftest import HTTP, http_of, samples
from tests.servers import endpoints_of, wait_until
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import bngrad
import bngrad.torch
from bngrad.torch._ahead import Inputs
from bngrad_cli.embedded import EmbeddedServer

SHAPE = (8, 64, 28, 28)
NBYTES = 4 * 8 * 64 * 28 * 28


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    """A server whose directory for clients on its host is not to be found, as on another host."""
    with EmbeddedServer(options=("--workers", "1", *HTTP)) as server:
        directory = Path(endpoints_of(server.target).local_directory)
        hidden = directory.rename(directory.with_name(f".hidden-{directory.name}"))
        yield server
        hidden.rename(directory)


@pytest.fixture(scope="module")
def http(server: EmbeddedServer) -> str:
    return http_of(server)


@pytest.fixture
def layer(server: EmbeddedServer, http: str) -> Iterator[bngrad.torch.BatchNorm2d]:
    """A layer whose client has made a call, so it knows its server."""
    with bngrad.Client(server.target) as client:
        layer = bngrad.torch.BatchNorm2d(SHAPE[1], client=client)
        gradient(layer, tensor())
        wait_for_ahead(http, 0)
        yield layer
    wait_for_ahead(http, 0)


def wait_for_ahead(http: str, tensors: int) -> None:
    def is_so() -> bool:
        found = samples(http)
        numbers = found["bngrad_ahead_tensors", ()], found["bngrad_ahead_bytes", ()]
        return numbers == (tensors, tensors * NBYTES)

    wait_until(is_so)


def tensor(seed: int = 0) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def gradient(layer: torch.nn.Module, x: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(layer(x).square().sum(), x)
    return found


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_the_backward_pass_uses_what_was_sent(
    layer: bngrad.torch.BatchNorm2d, http: str, memory_format: torch.memory_format
) -> None:
    x = tensor().detach().to(memory_format=memory_format).requires_grad_()
    expected = gradient(layer, x)
    wait_for_ahead(http, 0)
    loss = layer(x).square().sum()
    wait_for_ahead(http, 1)
    x.data.zero_()  # unseen by PyTorch
    (found,) = torch.autograd.grad(loss, x)
    assert torch.equal(found, expected)


def test_a_tensor_between_layers_is_sent_too(layer: bngrad.torch.BatchNorm2d, http: str) -> None:
    x = tensor()
    loss = layer(x * 2).sum()
    gc.collect()
    wait_for_ahead(http, 1)
    loss.backward()
    wait_for_ahead(http, 0)


def test_an_input_that_changed_is_refused(layer: bngrad.torch.BatchNorm2d) -> None:
    x = tensor() * 1
    loss = layer(x).square().sum()
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inputs_without_a_backward_pass_are_forgotten(layer: bngrad.torch.BatchNorm2d, http: str) -> None:
    y = layer(tensor())
    wait_for_ahead(http, 1)
    del y
    wait_for_ahead(http, 0)


def test_checkpoints_free_their_inputs_and_are_not_sent_for_long(layer: bngrad.torch.BatchNorm2d, http: str) -> None:
    expected = [gradient(layer, tensor(seed)) for seed in range(4)]

    def with_checkpoint(x: Tensor) -> Tensor:
        y: Tensor = checkpoint(lambda x: layer(x * 1), x, use_reentrant=False)
        wait_for_ahead(http, 0)  # the tensor has gone, though the backward pass is to come
        return y

    for seed in range(4):
        x = tensor(seed)
        (found,) = torch.autograd.grad(with_checkpoint(x).square().sum(), x)
        assert torch.equal(found, expected[seed])
    for _ in range(2):  # more were not used than were
        with_checkpoint(tensor())
    assert layer._inputs.send(layer.client, tensor(), is_training=True) is None


def test_a_measured_layer_sends_what_the_client_will_compute(layer: bngrad.torch.BatchNorm2d) -> None:
    assert layer.client is not None
    measured = bngrad.torch.convert_batchnorm(torch.nn.BatchNorm2d(SHAPE[1]), layer.client, where="measured")
    are_sent = []
    for _ in range(4):
        y = measured(tensor())
        are_sent.append(y.grad_fn.sent is not None)
        y.sum().backward()
    assert are_sent == [True, False, False, True]


def test_a_layer_sends_until_more_inputs_were_unused_than_used(layer: bngrad.torch.BatchNorm2d) -> None:
    layer._inputs = Inputs()
    for _ in range(3):
        loss = layer(tensor() * 1).sum()
        loss.backward()  # the input is gone now, but not the graph

    def is_sent_and_unused() -> bool:
        x = tensor()
        sent = layer._inputs.send(layer.client, x, is_training=True)
        del x
        return sent is not None

    assert [is_sent_and_unused() for _ in range(5)] == [True] * 4 + [False]


def test_a_layer_that_stops_sending_stops_no_other(layer: bngrad.torch.BatchNorm2d) -> None:
    assert layer.client is not None
    stock = torch.nn.Sequential(*map(torch.nn.BatchNorm2d, (SHAPE[1], SHAPE[1])))
    first, second = bngrad.torch.convert_batchnorm(stock, layer.client)
    assert isinstance(first, bngrad.torch.BatchNorm2d)
    first._inputs.count(is_training=True, was_used=False)
    assert first(tensor()).grad_fn.sent is None
    assert second(tensor()).grad_fn.sent is not None


def test_a_layer_stops_sending_however_long_its_inputs_were_used(layer: bngrad.torch.BatchNorm2d) -> None:
    inputs = Inputs()
    for was_used, times in ((True, 10**5), (False, 1001)):
        for _ in range(times):
            inputs.count(is_training=True, was_used=was_used)
    assert inputs.send(layer.client, tensor(), is_training=True) is None


def test_an_evaluation_without_backward_passes_stops_sending_and_training_goes_on(
    layer: bngrad.torch.BatchNorm2d,
) -> None:
    for _ in range(3):
        gradient(layer, tensor())
    layer.eval()
    assert [layer(tensor()).grad_fn.sent is not None for _ in range(3)] == [True, False, False]
    layer.train()
    assert layer(tensor()).grad_fn.sent is not None


def test_a_second_backward_pass_through_the_graph_has_the_same_gradient(layer: bngrad.torch.BatchNorm2d) -> None:
    x = tensor()
    loss = layer(x).square().sum()
    once, again = (torch.autograd.grad(loss, x, retain_graph=retain)[0] for retain in (True, False))
    assert torch.equal(once, again)


def test_a_copy_that_was_sent_of_an_input_is_not_kept_for_its_backward_pass(layer: bngrad.torch.BatchNorm2d) -> None:
    x = tensor()
    y = layer(x.transpose(2, 3))
    sent: Any = y.grad_fn.sent
    assert sent._tensor._arrays is None
    (found,) = torch.autograd.grad(y.square().sum(), x)
    (expected,) = torch.autograd.grad(layer(x).square().sum(), x)
    torch.testing.assert_close(found, expected)


def test_a_tensor_that_a_hook_has_saved_in_place_of_the_input_is_used_as_it_is(
    layer: bngrad.torch.BatchNorm2d, http: str
) -> None:
    x, found = tensor(), []
    for sent in (1, 0):
        with saved_tensors_hooks(lambda saved: saved, lambda saved: saved.round() if saved.shape == SHAPE else saved):
            loss = layer(x).square().sum()
        wait_for_ahead(http, sent)
        found.append(torch.autograd.grad(loss, x)[0])
        wait_for_ahead(http, 0)
        layer._inputs._balances[True] = -1  # it is not sent again
    assert torch.equal(*found)


def test_the_second_order(layer: bngrad.torch.BatchNorm2d) -> None:
    x = tensor()
    results = []
    for model in (layer, bngrad.torch.revert_batchnorm(torch.nn.Sequential(layer))):
        (first,) = torch.autograd.grad(model(x).pow(3).mean(), x, create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), x)[0])
    torch.testing.assert_close(*results)


def test_tensors_of_other_classes_have_gradients(layer: bngrad.torch.BatchNorm2d) -> None:
    x = tensor().detach()
    found = gradient(layer, TwoTensor(x, x).requires_grad_())  # type: ignore[no-untyped-call]
    assert type(found) is TwoTensor
    assert torch.equal(found.a, gradient(layer, tensor()))
    with FakeTensorMode():
        without_values = bngrad.torch.BatchNorm2d(SHAPE[1], client=layer.client)
        assert gradient(without_values, tensor()).shape == SHAPE
