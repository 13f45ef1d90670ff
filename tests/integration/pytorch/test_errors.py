"""What the layers of bngrad.torch refuse, and what of their clients' errors callers see."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tests.integration.pytorch.models import CHANNELS, OURS
from torch.nn.modules.batchnorm import _BatchNorm

import bngrad
import bngrad.torch
from bngrad.torch._clients import ClientReference, is_cold


def test_the_third_order_is_refused_with_a_way_out(client: bngrad.Client) -> None:
    layer, x = OURS["4d"](CHANNELS, client=client), torch.randn(4, CHANNELS, 3, 3)
    cubes: Any = lambda x: (layer(x) ** 3).sum()  # noqa: E731
    functional: Any = torch.autograd.functional
    with pytest.raises(NotImplementedError, match=r"no gradients of the third order, which .*hvp needs as well: vhp"):
        functional.hvp(cubes, x, torch.ones_like(x))
    functional.vhp(cubes, x, torch.ones_like(x))


@pytest.mark.parametrize("epsilon", [1e39, float("inf"), float("nan")])
def test_an_epsilon_that_float32_does_not_have_is_refused_before_the_statistics_change(
    client: bngrad.Client, epsilon: float
) -> None:
    layer = OURS["4d"](CHANNELS, eps=epsilon, client=client)
    with pytest.raises(ValueError, match="eps must be finite in float32"):
        layer(torch.randn(4, CHANNELS, 3, 3))
    assert layer.num_batches_tracked == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_other_dtypes_are_refused_in_one_sentence(client: bngrad.Client, dtype: torch.dtype) -> None:
    layer = OURS["2d"](CHANNELS, client=client)
    with pytest.raises(TypeError, match=rf"must have dtype float32, bfloat16 or float16, not {dtype}"):
        layer(torch.ones(4, CHANNELS, dtype=dtype))


def test_a_single_value_per_channel_is_refused_as_by_pytorch(client: bngrad.Client) -> None:
    x = torch.ones(1, CHANNELS, 1)
    for layer in (OURS["3d"](CHANNELS, client=client), torch.nn.BatchNorm1d(CHANNELS)):
        with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
            layer(x)


@pytest.mark.parametrize(
    ("epsilon", "training", "expected"), [(0.0, True, "positive during training"), (-1e-5, False, "non-negative")]
)
def test_an_epsilon_that_pytorch_refuses_is_refused(
    client: bngrad.Client, epsilon: float, training: bool, expected: str
) -> None:
    layer = OURS["4d"](CHANNELS, eps=epsilon, client=client).train(training)
    with pytest.raises(ValueError, match=f"batch_norm eps must be {expected}"):
        layer(torch.randn(4, CHANNELS, 3, 3))


@pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}], ids=str)
@pytest.mark.parametrize("channels", [CHANNELS - 1, CHANNELS + 1])
def test_another_number_of_channels_is_refused_as_by_pytorch(
    client: bngrad.Client, channels: int, options: dict[str, Any]
) -> None:
    def error(layer: _BatchNorm) -> str:
        with pytest.raises(RuntimeError, match=f"should contain {channels} elements not {CHANNELS}") as raised:
            layer(torch.ones(4, channels, requires_grad=True))
        return str(raised.value)

    ours = OURS["2d"](CHANNELS, **options, client=client)
    assert error(ours) == error(torch.nn.BatchNorm1d(CHANNELS, **options))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["running_mean", "running_var"])
def test_statistics_that_require_a_gradient_are_refused_as_by_pytorch(
    client: bngrad.Client, name: str, training: bool
) -> None:
    x = torch.randn(4, CHANNELS, 3, 3)
    for layer in (torch.nn.BatchNorm2d(CHANNELS), OURS["4d"](CHANNELS, client=client)):
        layer.train(training).get_buffer(name).requires_grad_()
        with pytest.raises(RuntimeError, match="not differentiable with respect to"):
            layer(x)
    assert layer.num_batches_tracked == 0


def test_errors_of_the_client_reach_the_caller() -> None:
    layer = OURS["2d"](CHANNELS, client=bngrad.Client("127.0.0.1:1", timeout=5))
    with pytest.raises(bngrad.UnavailableError, match=r"127\.0\.0\.1:1"):
        layer(torch.randn(4, CHANNELS)).sum().backward()


def test_a_server_that_is_away_compiles_no_kernels() -> None:
    with bngrad.Client("127.0.0.1:1", timeout=5, retries=False) as client:
        assert not is_cold(ClientReference(client).name)


def test_a_client_that_was_deleted_is_named() -> None:
    loss = OURS["2d"](CHANNELS, client=bngrad.Client("127.0.0.1:1"))(torch.randn(4, CHANNELS)).sum()
    with pytest.raises(RuntimeError, match="was deleted before the backward pass"):
        loss.backward()


@pytest.mark.parametrize("client", ["localhost:50051", None])
def test_a_client_must_be_one(client: Any) -> None:
    with pytest.raises(TypeError, match=rf"client must be a bngrad.Client, not {client!r}"):
        bngrad.torch.convert_batchnorm(torch.nn.BatchNorm1d(3), client)


@pytest.mark.parametrize("model", [None, [torch.nn.BatchNorm1d(3)]])
def test_a_model_must_be_one(model: Any) -> None:
    with bngrad.Client("127.0.0.1:1") as client:
        for change in (partial(bngrad.torch.convert_batchnorm, client=client), bngrad.torch.revert_batchnorm):
            with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, not "):
                change(model)
