"""Whole models with bngrad.torch: conversion, copies, training in every manner, and servers that die meanwhile."""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.integration.pytorch.models import data, network, train
from tests.servers import free_port
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import bngrad
import bngrad.torch
from bngrad.torch._placement import Placement, Placements
from bngrad_cli.embedded import EmbeddedServer

NORMS = 9
DISTRIBUTED = Path(__file__).with_name("distributed.py")


def ours_in(model: nn.Module) -> list[bngrad.torch.BatchNorm2d]:
    return [module for module in model.modules() if isinstance(module, bngrad.torch.BatchNorm2d)]


def gradients(model: nn.Module) -> list[Tensor]:
    ((images, labels),) = data(1)
    loss = nn.functional.cross_entropy(model(images), labels)
    return list(torch.autograd.grad(loss, list(model.parameters())))


def test_a_model_is_converted_and_reverted_in_place(client: bngrad.Client) -> None:
    model = network()
    objects, names = list(model.modules()), list(model.state_dict())
    assert bngrad.torch.convert_batchnorm(model, client) is model
    assert len(ours_in(model)) == NORMS
    assert all(layer.client is client for layer in ours_in(model))
    assert (list(model.modules()), list(model.state_dict())) == (objects, names)
    assert bngrad.torch.revert_batchnorm(model) is model
    assert [type(module) for module in model.modules()] == [type(module) for module in network().modules()]
    assert [vars(module).keys() for module in objects] == [vars(module).keys() for module in network().modules()]


def test_a_layer_alone_is_converted(client: bngrad.Client) -> None:
    layer = bngrad.torch.convert_batchnorm(nn.BatchNorm1d(3), client)
    assert isinstance(layer, bngrad.torch.BatchNorm1d)


def test_a_printed_model_tells_which_layers_have_a_client(client: bngrad.Client) -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.LayerNorm(3))
    stock = repr(model)
    converted = repr(bngrad.torch.convert_batchnorm(model, client))
    assert converted == stock.replace("track_running_stats=True)", f"track_running_stats=True, client={client!r})")
    assert repr(bngrad.torch.revert_batchnorm(model)) == stock


def test_subclasses_stay_as_they_are_and_a_model_of_nothing_else_is_told(client: bngrad.Client) -> None:
    class Own(nn.BatchNorm2d):
        pass

    model = nn.Sequential(Own(3), nn.SyncBatchNorm(3), nn.LazyBatchNorm2d())
    with pytest.warns(UserWarning, match="convert_batchnorm changed nothing: the model has no torch.nn.BatchNorm1d"):
        bngrad.torch.convert_batchnorm(model, client)
    assert [type(module) for module in model] == [Own, nn.SyncBatchNorm, nn.LazyBatchNorm2d]


def test_subclasses_and_parametrised_layers_are_reverted_to_layers_without_a_client(client: bngrad.Client) -> None:
    class Own(bngrad.torch.BatchNorm2d):
        pass

    model = bngrad.torch.convert_batchnorm(nn.Sequential(Own(3), nn.BatchNorm2d(3)), client)
    parametrize.register_parametrization(model[1], "weight", nn.Identity())
    bngrad.torch.revert_batchnorm(model)
    assert [layer.client for layer in ours_in(model)] == [None, None]


def test_a_parametrised_layer_computes_its_weight_once(client: bngrad.Client) -> None:
    calls = []

    class Counted(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            calls.append(weight)
            return weight

    layer = bngrad.torch.convert_batchnorm(nn.BatchNorm2d(3), client)
    parametrize.register_parametrization(layer, "weight", Counted())
    calls.clear()
    layer(torch.randn(2, 3, 4, 4))
    assert len(calls) == 1


def test_copies_share_the_client_and_pickles_have_none(client: bngrad.Client) -> None:
    model = bngrad.torch.convert_batchnorm(network(), client)
    assert all(layer.client is client for layer in ours_in(copy.deepcopy(model)))
    unpickled: nn.Sequential = pickle.loads(pickle.dumps(model))  # noqa: S301 - our own
    assert all(layer.client is None for layer in ours_in(unpickled))
    expected = gradients(model)
    for ours, theirs in zip(gradients(unpickled), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert all(map(torch.equal, gradients(bngrad.torch.convert_batchnorm(unpickled, client)), expected))


def test_measured_layers_are_copied_and_pickled_at_any_time(client: bngrad.Client) -> None:
    model = bngrad.torch.convert_batchnorm(network(), client, where="measured")
    pending = model(data()[0][0]).sum()
    for _ in range(3):
        copied, unpickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))  # noqa: S301 - our own
        expected = gradients(bngrad.torch.revert_batchnorm(copy.deepcopy(model)))
        for each in (copied, unpickled):
            for ours, theirs in zip(gradients(each), expected, strict=True):
                torch.testing.assert_close(ours, theirs)
        gradients(model)
    pending.backward()


def test_a_state_dict_is_exchanged_with_a_stock_model(client: bngrad.Client, tmp_path: Path) -> None:
    model = bngrad.torch.convert_batchnorm(network(), client)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=True)
    network().load_state_dict(loaded)
    model.load_state_dict(network().state_dict())


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("bfloat16", [False, True], ids=["float32", "bfloat16 autocast"])
def test_losses_are_those_of_stock_pytorch(
    client: bngrad.Client, memory_format: torch.memory_format, bfloat16: bool
) -> None:
    stock = train(network(), data(), memory_format=memory_format, bfloat16=bfloat16)
    ours = train(
        bngrad.torch.convert_batchnorm(network(), client), data(), memory_format=memory_format, bfloat16=bfloat16
    )
    assert ours[0] == stock[0]
    assert ours == pytest.approx(stock, abs=3e-2 if bfloat16 else 7e-4)


@pytest.mark.filterwarnings("ignore")  # PyTorch's compiler warns of itself
def test_a_compiled_model_has_no_graph_break(client: bngrad.Client) -> None:
    model = bngrad.torch.convert_batchnorm(network(), client)
    compiled = copy.deepcopy(model)
    compiled.compile(backend="aot_eager", fullgraph=True)
    assert train(compiled, data(2)) == pytest.approx(train(model, data(2)), rel=1e-6)


def test_checkpoints_change_nothing(client: bngrad.Client) -> None:
    model = bngrad.torch.convert_batchnorm(network(), client)
    ((images, _),) = data(1)
    y = checkpoint_sequential(model, 3, images.requires_grad_(), use_reentrant=False)  # type: ignore[no-untyped-call]
    found, expected = (torch.autograd.grad(each.square().sum(), images)[0] for each in (y, model(images)))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("manner", ["DDP", "FSDP"])
def test_two_processes_train_a_model(server: EmbeddedServer, tmp_path: Path, manner: str) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, DISTRIBUTED, manner, str(rank), tmp_path / "store", server.target], stdout=subprocess.PIPE
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert outputs[0] == outputs[1] == b"the gradients agree\n"


def test_losses_keep_their_bits_when_servers_die_and_come_back(client: bngrad.Client) -> None:
    undisturbed = train(bngrad.torch.convert_batchnorm(network(), client), data())
    address = f"127.0.0.1:{free_port()}"
    late = EmbeddedServer(address)
    starting = threading.Thread(target=late.__enter__)
    with (
        EmbeddedServer() as first,
        EmbeddedServer(address) as second,
        bngrad.Client([first.target, second.target], timeout=240) as disturbed,
    ):

        def disturb(step: int) -> None:
            if step == 1:
                first.process.kill()
            if step == 4:
                second.process.kill()
                second.process.wait()
                starting.start()

        try:
            losses = train(bngrad.torch.convert_batchnorm(network(), disturbed), data(), after_step=disturb)
        finally:
            starting.join()
            late.__exit__()
    assert losses == undisturbed


def test_measured_layers_are_computed_where_they_are_faster(
    client: bngrad.Client, capfd: pytest.CaptureFixture[str]
) -> None:
    model = bngrad.torch.convert_batchnorm(network(), client, where="measured")
    losses = train(model, data(11))
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1 + NORMS
    assert all(re.search(r": PyTorch [\d.]+, client [\d.]+: (client|PyTorch)$", line) for line in lines[1:])
    assert losses == pytest.approx(train(network(), data(11)), abs=7e-4)


def test_each_choice_is_printed_once(client: bngrad.Client, capfd: pytest.CaptureFixture[str]) -> None:
    model = bngrad.torch.convert_batchnorm(nn.Sequential(*map(nn.BatchNorm1d, (3, 3))), client, where="measured")
    x = torch.randn(4, 3, requires_grad=True)
    for layer in model:
        for _ in range(10):
            layer(x).pow(3).sum().backward()
    printed = [line.partition(":")[0] for line in capfd.readouterr().err.splitlines()]
    assert printed == ["bngrad", "  0", "bngrad", "  1"]


def test_a_choice_is_printed_though_another_layer_is_used_no_longer(
    client: bngrad.Client, capfd: pytest.CaptureFixture[str]
) -> None:
    model = bngrad.torch.convert_batchnorm(nn.Sequential(*map(nn.BatchNorm1d, (3, 3))), client, where="measured")
    for step in range(10):
        if step == 4:
            model[0].requires_grad_(False)
        model(torch.randn(4, 3)).pow(3).sum().backward()
    assert [line.partition(":")[0] for line in capfd.readouterr().err.splitlines()] == ["bngrad", "  1"]


def test_layers_whose_uses_alternate_in_size_are_measured_with_both(client: bngrad.Client) -> None:
    placement = Placements().add("layer")
    places: dict[bool, list[int]] = {False: [], True: []}
    for use in range(10):
        by_client = placement.next_by_client()
        ours, pytorch = (partial(places[each].append, use % 2) for each in (True, False))
        placement.compute(nn.Identity(), ours, pytorch, is_server_cold=bool)
        assert places[by_client][-1] == use % 2
    assert [sorted(sizes[1:]) for sizes in places.values()] == [[0, 0, 1, 1]] * 2, "the first is not counted"


def test_a_layer_is_left_to_pytorch_only_once_its_server_has_compiled_its_kernels(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """So no time counts that was measured before."""
    placement = Placements().add("layer")
    for use in range(20):
        assert placement.by_client is None
        is_cold = partial(bool, use < 5)
        placement.compute(nn.Identity(), partial(time.sleep, 1e-3), int, is_server_cold=is_cold)
    assert placement.by_client is False


def test_measured_layers_in_checkpoints_have_right_gradients(client: bngrad.Client) -> None:
    def gradients_by_step(layer: nn.BatchNorm2d) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        found: list[Tensor] = []
        for _ in range(8):  # the place is chosen within the sixth; each step has two uses, repeated while others wait
            x = torch.randn(4, 3, 5, 5, generator=generator, requires_grad=True)
            once = checkpoint(layer, x, use_reentrant=False)
            twice = checkpoint(layer, once * x, use_reentrant=False)
            found += torch.autograd.grad(twice.pow(3).sum(), [x, *layer.parameters()])
        return found

    ours = bngrad.torch.convert_batchnorm(nn.BatchNorm2d(3), client, where="measured")
    for found, expected in zip(gradients_by_step(ours), gradients_by_step(nn.BatchNorm2d(3)), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    x = torch.randn(4, 3, 5, 5, requires_grad=True)
    assert type(ours(x).grad_fn) is type(nn.BatchNorm2d(3)(x).grad_fn)  # for so few elements PyTorch is faster


def test_a_choice_is_made_and_printed_once(capfd: pytest.CaptureFixture[str]) -> None:
    placement = Placements().add("layer")
    for _ in range(20):
        placement.compute(nn.Identity(), list[int], list[int], is_server_cold=bool)
    assert placement.by_client is not None
    assert capfd.readouterr().err.count("layer") == 1


def test_layers_that_were_measured_are_converted_to_have_the_client_everywhere(client: bngrad.Client) -> None:
    model = bngrad.torch.convert_batchnorm(network(), client, where="measured")
    assert all(layer._placement is not None for layer in ours_in(model))
    bngrad.torch.convert_batchnorm(model, client)
    assert all(layer._placement is None for layer in ours_in(model))


def test_a_measured_layer_is_left_to_pytorch_once_no_backward_pass_is_to_come(client: bngrad.Client) -> None:
    """Also while an earlier output is kept."""
    layer = bngrad.torch.convert_batchnorm(nn.BatchNorm1d(3), client, where="measured")
    x = torch.randn(4, 3, requires_grad=True)
    loss = layer(x).sum()
    loss.backward(retain_graph=True)
    placement = layer._placement
    assert isinstance(placement, Placement)
    placement.by_client = False
    assert not placement.is_left_to_pytorch
    loss.backward()
    assert placement.is_left_to_pytorch
    assert type(layer(x).grad_fn) is type(nn.BatchNorm1d(3)(x).grad_fn)


def test_where_is_one_of_two_words(client: bngrad.Client) -> None:
    with pytest.raises(ValueError, match="where must be 'everywhere' or 'measured', not 'here'"):
        bngrad.torch.convert_batchnorm(network(), client, where="here")  # type: ignore[arg-type]
