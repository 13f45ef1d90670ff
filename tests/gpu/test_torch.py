"""bngrad.torch with tensors on a GPU, against PyTorch's own layers there. `make gpu-test` runs this."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.integration.pytorch.models import (
    CHANNELS,
    MEMORY_FORMATS,
    OURS,
    TOLERANCES,
    assert_close,
    data,
    gradients,
    network,
    randomised,
    second_order,
    tensors,
    train,
)
from torch import Tensor, nn

import bngrad
import bngrad.torch
from bngrad_cli.embedded import EmbeddedServer

DEVICE = os.environ.get("BNGRAD_TEST_DEVICE", "cpu")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cpu", reason="make gpu-test runs it, on a machine with a GPU"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer(device=DEVICE, options=("--arena-bytes", "1GiB")) as server:
        yield server


@pytest.fixture(scope="module", params=["auto", "stream"])
def client(request: pytest.FixtureRequest, server: EmbeddedServer) -> Iterator[bngrad.Client]:
    with bngrad.Client(server.target, transport=request.param) as client:
        yield client


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize(("rank", "memory_format"), MEMORY_FORMATS, ids=str)
def test_the_forward_has_pytorchs_bits_and_the_gradients_are_right(
    client: bngrad.Client, rank: str, memory_format: torch.memory_format, is_training: bool, dtype: torch.dtype
) -> None:
    ours = randomised(OURS[rank](CHANNELS, client=client)).to(DEVICE).train(is_training)
    stock = bngrad.torch.revert_batchnorm(copy.deepcopy(ours))
    x, y_backprop = tensors(rank, memory_format, dtype, DEVICE)
    exact = gradients(copy.deepcopy(stock).double(), x.double(), y_backprop.double())[1]
    y, found = gradients(ours, x, y_backprop)
    expected = stock(x)
    assert torch.equal(y, expected)
    assert y.stride() == expected.stride()
    for name, buffer in stock.named_buffers():
        assert torch.equal(ours.get_buffer(name), buffer)
    assert found[0].is_contiguous(memory_format=memory_format)
    assert [each.dtype for each in found] == [dtype, *(parameter.dtype for parameter in ours.parameters())]
    assert_close(found, exact, TOLERANCES[dtype])


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize(("rank", "memory_format"), MEMORY_FORMATS, ids=str)
def test_the_second_order_is_right(
    client: bngrad.Client, rank: str, memory_format: torch.memory_format, is_training: bool
) -> None:
    ours = randomised(OURS[rank](CHANNELS, client=client)).to(DEVICE).train(is_training)
    exact = bngrad.torch.revert_batchnorm(copy.deepcopy(ours)).double()
    x, y_backprop = tensors(rank, memory_format, device=DEVICE)
    assert_close(second_order(ours, x, y_backprop), second_order(exact, x.double(), y_backprop.double()), 5e-6)


@pytest.mark.parametrize("stream", [None, "another"])
def test_tensors_that_are_still_computed_are_waited_for(client: bngrad.Client, stream: str | None) -> None:
    """Of 51 MB, on whichever stream: x and y_backprop are on their way when the layer and the client are called."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    x, y_backprop = (torch.randn((16, 256, 56, 56), generator=generator, device=DEVICE) for _ in range(2))
    layer = bngrad.torch.convert_batchnorm(nn.BatchNorm2d(256, device=DEVICE), client)
    ready = x * 3 - 1, y_backprop * 2
    torch.cuda.synchronize()
    _, expected = gradients(layer, *ready)
    other: Any = torch.cuda.Stream() if stream else torch.cuda.current_stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(other):
        found = [gradients(layer, x * 3 - 1, y_backprop * 2)[1] for _ in range(5)]
    other.synchronize()
    for each in found:
        assert all(map(torch.equal, each, expected))
    double = ready[0].double().requires_grad_()
    exact = torch.autograd.grad(nn.functional.batch_norm(double, None, None, training=True), double, ready[1].double())
    assert_close(expected[:1], list(exact), 1e-5)


@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_network_trains_as_with_pytorch(
    client: bngrad.Client, monkeypatch: pytest.MonkeyPatch, memory_format: torch.memory_format, bfloat16: bool
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # of convolutions: it multiplies every difference
    stock = network()
    ours = bngrad.torch.convert_batchnorm(copy.deepcopy(stock), client)
    expected = train(stock, data(20), bfloat16=bfloat16, memory_format=memory_format, device=DEVICE)
    found = train(ours, data(20), bfloat16=bfloat16, memory_format=memory_format, device=DEVICE)
    assert found == pytest.approx(expected, abs=2e-2 if bfloat16 else 1e-3)


def test_a_compiled_network_computes_the_same(client: bngrad.Client) -> None:
    ours = bngrad.torch.convert_batchnorm(network(), client).to(DEVICE)
    ((images, labels),) = data(1)
    images, labels = images.to(DEVICE), labels.to(DEVICE)

    def gradients_of(model: Any) -> list[Tensor]:
        loss = nn.functional.cross_entropy(model(images), labels)
        return list(torch.autograd.grad(loss, list(ours.parameters())))

    plain = gradients_of(ours)
    compiled = gradients_of(torch.compile(ours, fullgraph=True))
    torch.testing.assert_close(compiled, plain, rtol=1e-3, atol=1e-4)


def test_measured_layers_are_left_to_the_gpu(client: bngrad.Client, capfd: pytest.CaptureFixture[str]) -> None:
    model = bngrad.torch.convert_batchnorm(network(), client, where="measured")
    train(model, data(20), device=DEVICE)
    assert capfd.readouterr().err.count(": PyTorch\n") == 9


def test_a_tensor_on_a_gpu_is_refused_by_the_client_itself(client: bngrad.Client) -> None:
    x = torch.ones(1, 2, 2, 3, device=DEVICE)
    vector: Any = [1.0, 1.0, 1.0]
    with pytest.raises(bngrad.InvalidArgumentError, match=r"y_backprop .* device cuda:0"):
        client.fused_batch_norm_grad_v2(x, x, vector, vector, vector)
