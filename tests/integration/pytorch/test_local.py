"""The layers of bngrad.torch with a client that computes in this process, against one that asks a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from tests.integration.pytorch.models import CHANNELS, MEMORY_FORMATS, OURS, SHAPES, randomised
from tests.kernels.cold_cache import assert_prints_the_same
from torch import Tensor
from torch.func import functional_call
from torch.testing._internal.two_tensor import TwoTensor

import bngrad
import bngrad.torch
from bngrad._local.kernels import LocalKernels
from bngrad.torch._clients import ClientReference
from bngrad.torch._local import _POOLED_FROM_NBYTES

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def local() -> Iterator[bngrad.Client]:
    with bngrad.Client("local:") as client:
        yield client


def gradients(client: bngrad.Client, rank: str, x: Tensor, y_backprop: Tensor, *, affine: bool = True) -> list[Tensor]:
    """Returns the gradients of a layer's input and parameters."""
    layer = randomised(OURS[rank](CHANNELS, affine=affine, client=client))
    x = x.detach().requires_grad_()
    return list(torch.autograd.grad(layer(x), [x, *layer.parameters()], y_backprop))


def assert_same_bits(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
@pytest.mark.parametrize(("rank", "memory_format"), MEMORY_FORMATS, ids=str)
def test_the_gradients_have_the_bits_of_a_servers(
    client: bngrad.Client,
    local: bngrad.Client,
    rank: str,
    memory_format: torch.memory_format,
    affine: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LocalKernels, "run", None)  # the slower way
    x, y_backprop = (torch.randn(SHAPES[rank]).to(dtype).to(memory_format=memory_format) for _ in range(2))
    found, expected = (gradients(each, rank, x, y_backprop, affine=affine) for each in (local, client))
    assert_same_bits(found, expected)
    assert found[0].stride() == expected[0].stride()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_gradients_in_memory_of_the_client_are_right_and_stay_as_they_are(
    local: bngrad.Client, memory_format: torch.memory_format
) -> None:
    layer, stock = OURS["4d"](CHANNELS, client=local), torch.nn.BatchNorm2d(CHANNELS)
    x, *changes = (torch.randn(12, CHANNELS, 512, 512).to(memory_format=memory_format) for _ in range(3))
    x.requires_grad_()
    found, expected = ([torch.autograd.grad(each(x), x, change)[0] for change in changes] for each in (layer, stock))
    assert found[0].nbytes > _POOLED_FROM_NBYTES
    for one, other in zip(found, expected, strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor.transpose(2, 3).contiguous().transpose(2, 3),
        lambda tensor: torch.cat([tensor, tensor], 1)[:, :CHANNELS],
        lambda tensor: tensor[:, :, :1, :1].expand(SHAPES["4d"]),
    ],
    ids=["transposed", "a part of the channels", "expanded"],
)
@pytest.mark.parametrize("changed", ["x", "y_backprop"])
def test_tensors_may_lie_anyhow_in_memory(
    local: bngrad.Client, changed: str, change: Callable[[Tensor], Tensor]
) -> None:
    tensors = {"x": torch.randn(SHAPES["4d"]), "y_backprop": torch.randn(SHAPES["4d"])}
    tensors[changed] = change(tensors[changed])
    assert not tensors[changed].is_contiguous()
    plain = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    statistics = torch.rand(3, CHANNELS)
    found, expected = (
        torch.ops.bngrad.batch_norm_grad(
            each["y_backprop"], each["x"], *statistics, 1e-5, True, ClientReference(local).name
        )
        for each in (tensors, plain)
    )
    assert_same_bits(found, expected)


UNSTORED: dict[str, Callable[[tuple[int, ...]], Tensor]] = {
    "negated by a bit": lambda shape: torch._neg_view(torch.randn(shape)),
    "zeros without memory": torch._efficientzerotensor,
}


@pytest.mark.parametrize("by", ["server", "local"])
@pytest.mark.parametrize("changed", ["x", "y_backprop", "weight"])
@pytest.mark.parametrize("kind", UNSTORED)
def test_memory_need_not_hold_a_tensors_values(
    client: bngrad.Client, local: bngrad.Client, by: str, changed: str, kind: str
) -> None:
    shapes: dict[str, tuple[int, ...]] = {"x": SHAPES["4d"], "y_backprop": SHAPES["4d"], "weight": (CHANNELS,)}
    stored = {name: torch.randn(shape) for name, shape in shapes.items()}
    unstored = UNSTORED[kind](shapes[changed])
    layer = OURS["4d"](CHANNELS, client={"server": client, "local": local}[by])

    def found(x: Tensor, y_backprop: Tensor, weight: Tensor) -> Sequence[Tensor]:
        inputs = x.requires_grad_(), weight.requires_grad_()
        return torch.autograd.grad(functional_call(layer, {"weight": weight}, (x,)), inputs, y_backprop)

    expected = found(**(stored | {changed: unstored.clone().resolve_neg()}))
    assert_same_bits(found(**(stored | {changed: unstored})), expected)


@pytest.mark.parametrize("by", ["server", "local"])
def test_gradients_may_be_of_a_class_of_their_own(client: bngrad.Client, local: bngrad.Client, by: str) -> None:
    chosen, x = {"server": client, "local": local}[by], torch.randn(SHAPES["4d"])
    zeros = torch.zeros_like(x)
    for found in gradients(chosen, "4d", x, TwoTensor(zeros, zeros)):  # type: ignore[no-untyped-call]
        assert type(found) is TwoTensor
        assert not found.a.any()


def test_tensors_need_not_be_aligned(local: bngrad.Client) -> None:
    x = torch.randn(SHAPES["4d"])
    memory = bytearray(1 + 4 * x.numel())
    memory[1:] = x.numpy().tobytes()
    unaligned = torch.frombuffer(memory, dtype=torch.float32, offset=1).view(x.shape)
    assert unaligned.data_ptr() % 4
    assert_same_bits(gradients(local, "4d", unaligned, x), gradients(local, "4d", x, x))


@pytest.mark.parametrize(
    "changes",
    [
        {"y_backprop": torch.zeros(1, *SHAPES["4d"][1:])},
        {"y_backprop": torch.zeros(SHAPES["4d"], dtype=torch.bfloat16)},
        {"y_backprop": torch.zeros(SHAPES["4d"]).double(), "x": torch.zeros(SHAPES["4d"]).double()},
        *({name: torch.zeros(1)} for name in ("weight", "mean", "rstd")),
    ],
    ids=["shape", "dtype", "float64", "weight", "mean", "rstd"],
)
@pytest.mark.parametrize("by", ["server", "local"])
def test_tensors_that_do_not_fit_are_refused(
    client: bngrad.Client, local: bngrad.Client, by: str, changes: dict[str, Tensor]
) -> None:
    """The kernels of this process would read past the end of them."""
    large, per_channel = torch.zeros(SHAPES["4d"]), torch.zeros(CHANNELS)
    tensors = {"y_backprop": large, "x": large, "weight": per_channel, "mean": per_channel, "rstd": per_channel}
    name = ClientReference({"server": client, "local": local}[by]).name
    with pytest.raises(bngrad.InvalidArgumentError):
        torch.ops.bngrad.batch_norm_grad(*(tensors | changes).values(), 1e-5, True, name)


@pytest.mark.parametrize("by", ["server", "local"])
def test_tensors_without_elements_have_gradients_of_zero(client: bngrad.Client, local: bngrad.Client, by: str) -> None:
    x, per_channel = torch.zeros(0, CHANNELS, 2, 2), torch.ones(CHANNELS)
    name = ClientReference({"server": client, "local": local}[by]).name
    found, *sums = torch.ops.bngrad.batch_norm_grad(x, x, *[per_channel] * 3, 1e-5, True, name)
    assert found.shape == x.shape
    assert not any(map(torch.any, sums))


def test_a_closed_client_computes_nothing() -> None:
    client = bngrad.Client("local:")
    layer = OURS["4d"](CHANNELS, client=client)
    y = layer(torch.randn(SHAPES["4d"], requires_grad=True))
    client.close()
    with pytest.raises(bngrad.ClientClosedError):
        y.sum().backward()


def test_the_bits_are_the_same_while_the_kernel_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
import torch, bngrad, bngrad.torch
torch.manual_seed(0)
client = bngrad.Client("local:")
for make, shape in ((bngrad.torch.BatchNorm1d, (9, 4)), (bngrad.torch.BatchNorm2d, (3, 4, 5, 6))):
    for affine in (True, False):
        x = torch.randn(shape, requires_grad=True)
        layer = make(4, affine=affine, client=client)
        layer(x).backward(torch.randn(shape))
        print([each.grad.numpy().tobytes().hex() for each in (x, *layer.parameters())])
print(client.server_info().compiling)
"""
    assert_prints_the_same(code, tmp_path, monkeypatch)
