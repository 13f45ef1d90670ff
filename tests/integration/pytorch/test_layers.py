"""The layers and operators of bngrad.torch, one at a time, against PyTorch's own."""

from __future__ import annotations

import copy
from typing import Any, Literal

import pytest
import torch
from tests.integration.pytorch.models import (
    CHANNELS,
    MEMORY_FORMATS,
    OURS,
    SHAPES,
    TOLERANCES,
    assert_close,
    gradients,
    randomised,
    second_order,
    tensors,
)
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

import bngrad
import bngrad.torch
from bngrad.torch._placement import Placement


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("mode", ["training", "evaluation", "plain", "untracked", "averaging", "dtype of x"])
@pytest.mark.parametrize(("rank", "memory_format"), MEMORY_FORMATS, ids=str)
def test_the_forward_has_pytorchs_bits_and_the_gradients_are_right(
    client: bngrad.Client, rank: str, memory_format: torch.memory_format, mode: str, dtype: torch.dtype
) -> None:
    options: dict[str, dict[str, Any]] = {
        "plain": {"affine": False},
        "untracked": {"track_running_stats": False},
        "averaging": {"momentum": None},
        "dtype of x": {"dtype": dtype},
    }
    ours = randomised(OURS[rank](CHANNELS, **options.get(mode, {}), client=client)).train(mode != "evaluation")
    stock = bngrad.torch.revert_batchnorm(copy.deepcopy(ours))
    x, y_backprop = tensors(rank, memory_format, dtype)
    exact = gradients(copy.deepcopy(stock).double(), x.double(), y_backprop.double())[1]
    y, found = gradients(ours, x, y_backprop)
    expected = stock(x)
    assert torch.equal(y, expected)
    assert y.stride() == expected.stride()
    for name, buffer in stock.named_buffers():
        assert torch.equal(ours.get_buffer(name), buffer)
    assert found[0].is_contiguous(memory_format=memory_format)
    assert [each.dtype for each in found] == [dtype, *(parameter.dtype for parameter in ours.parameters())]
    # PyTorch rounds the saved mean of 16-bit parameters to 16 bits.
    assert_close(found, exact, TOLERANCES[dtype] * (4 if mode == "dtype of x" else 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_layer_of_16_bits_computes_in_more_in_evaluation(client: bngrad.Client, dtype: torch.dtype) -> None:
    layer = randomised(OURS["4d"](CHANNELS, dtype=dtype, client=client)).eval()
    assert layer.running_var is not None
    x, y_backprop = tensors("4d", torch.contiguous_format, dtype)
    factor = layer.weight.double() / (layer.running_var.double() + layer.eps).sqrt()
    expected = y_backprop.double() * factor[:, None, None]
    assert torch.equal(gradients(layer, x, y_backprop)[1][0], expected.to(dtype))


@pytest.mark.parametrize("frozen", [(), ("weight",), ("bias",), ("weight", "bias")], ids=str)
@pytest.mark.parametrize("of_x", [True, False], ids=["of x", "not of x"])
def test_the_client_computes_what_needs_a_gradient(client: bngrad.Client, frozen: tuple[str, ...], of_x: bool) -> None:
    ours = randomised(OURS["4d"](CHANNELS, client=client))
    for name in frozen:
        ours.get_parameter(name).requires_grad_(False)
    exact = bngrad.torch.revert_batchnorm(copy.deepcopy(ours)).double()
    x, y_backprop = tensors("4d", torch.contiguous_format)

    def found(layer: _BatchNorm, x: Tensor, y_backprop: Tensor) -> tuple[Tensor, list[Tensor]]:
        x = x.detach().requires_grad_(of_x)
        inputs = [each for each in (x, *layer.parameters()) if each.requires_grad]
        y = layer(x)
        return y, list(torch.autograd.grad(y, inputs, y_backprop)) if inputs else []

    y, gradients = found(ours, x, y_backprop)
    assert_close(gradients, found(exact, x.double(), y_backprop.double())[1], TOLERANCES[torch.float32])
    assert y.requires_grad == bool(gradients)
    assert isinstance(y.grad_fn, torch.autograd.function.BackwardCFunction) == bool(gradients)


def test_an_empty_batch_is_pytorchs_own(client: bngrad.Client) -> None:
    x = torch.randn(0, CHANNELS, 3, 3, requires_grad=True)
    ours, stock = (layer(x).grad_fn for layer in (OURS["4d"](CHANNELS, client=client), torch.nn.BatchNorm2d(CHANNELS)))
    assert type(ours) is type(stock)


def test_a_dispatch_mode_sees_the_operator(client: bngrad.Client) -> None:
    seen = []

    class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Watching():  # type: ignore[no-untyped-call]
        gradients(OURS["4d"](CHANNELS, client=client), *tensors("4d", torch.contiguous_format))
    assert seen.count("bngrad.batch_norm_grad.default") == 1


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("rank", "memory_format"), MEMORY_FORMATS, ids=str)
def test_the_second_order_is_right(
    client: bngrad.Client, rank: str, memory_format: torch.memory_format, training: bool
) -> None:
    ours = randomised(OURS[rank](CHANNELS, client=client)).train(training)
    exact = bngrad.torch.revert_batchnorm(copy.deepcopy(ours)).double()
    x, y_backprop = tensors(rank, memory_format)
    assert_close(second_order(ours, x, y_backprop), second_order(exact, x.double(), y_backprop.double()), 5e-6)


def test_a_tensor_of_mkldnn_is_pytorchs_own(client: bngrad.Client) -> None:
    x = torch.randn(4, CHANNELS, 3, 3, requires_grad=True)
    OURS["4d"](CHANNELS, client=client)(x.to_mkldnn()).to_dense().sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("frozen", [(), ("weight",), ("weight", "bias")], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_what_pytorch_computes_of_a_measured_layer_has_its_bits(
    client: bngrad.Client, training: bool, dtype: torch.dtype, frozen: tuple[str, ...]
) -> None:
    def both_orders(layer: torch.nn.BatchNorm2d) -> tuple[list[Tensor], list[Tensor]]:
        x = tensors("4d", torch.contiguous_format, dtype)[0].requires_grad_()
        inputs = [x, *(parameter for parameter in layer.parameters() if parameter.requires_grad)]
        first = torch.autograd.grad(layer(x).pow(3).sum(), inputs, create_graph=True)
        return list(first), list(torch.autograd.grad(first[0].square().sum(), inputs))

    stock = randomised(torch.nn.BatchNorm2d(CHANNELS)).train(training)
    for name in frozen:
        stock.get_parameter(name).requires_grad_(False)
    ours = bngrad.torch.convert_batchnorm(copy.deepcopy(stock), client, where="measured")
    ours(tensors("4d", torch.contiguous_format, dtype)[0].requires_grad_()).sum().backward()  # the client's turn
    found, expected = both_orders(ours), both_orders(stock)
    assert all(map(torch.equal, found[0], expected[0]))
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-2)


def test_a_measured_layer_alone_is_printed_by_its_class(
    client: bngrad.Client, capfd: pytest.CaptureFixture[str]
) -> None:
    layer = bngrad.torch.convert_batchnorm(torch.nn.BatchNorm1d(CHANNELS), client, where="measured")
    for _ in range(10):
        layer(tensors("2d", torch.contiguous_format)[0].requires_grad_()).sum().backward()
    assert capfd.readouterr().err.splitlines()[1].startswith("  BatchNorm1d: PyTorch ")


@pytest.mark.filterwarnings("ignore")  # PyTorch's compiler warns of itself
def test_a_measured_layer_that_is_compiled_calls_the_client() -> None:
    with bngrad.Client("local:") as local:
        layer = bngrad.torch.convert_batchnorm(torch.nn.BatchNorm2d(CHANNELS), local, where="measured")
        placement = layer._placement
        assert isinstance(placement, Placement)
        placement.by_client = False  # which holds for eager mode
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        y = compiled(tensors("4d", torch.contiguous_format)[0].requires_grad_())
    with pytest.raises(bngrad.ClientClosedError):
        y.sum().backward()


@pytest.mark.filterwarnings("ignore:Input #. requires gradient and is not a double precision")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("rank", SHAPES)
def test_gradcheck_passes(client: bngrad.Client, rank: str, training: bool) -> None:
    layer = randomised(OURS[rank](CHANNELS, momentum=0.0, client=client)).train(training)

    def call(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        result: Tensor = functional_call(layer, {"weight": weight, "bias": bias}, (x,))
        return result

    x = tensors(rank, torch.contiguous_format)[0].requires_grad_()
    inputs = (x, *(parameter.detach().requires_grad_() for parameter in layer.parameters()))
    assert gradcheck(call, inputs, eps=1e-2, atol=2e-2, rtol=2e-2, fast_mode=True)
    assert gradgradcheck(call, inputs, eps=1e-2, atol=5e-2, rtol=5e-2, fast_mode=True)


@pytest.mark.parametrize(("rank", "memory_format"), MEMORY_FORMATS, ids=str)
def test_opcheck_passes(client: bngrad.Client, rank: str, memory_format: torch.memory_format) -> None:
    x, y_backprop = tensors(rank, memory_format)
    weight = torch.rand(CHANNELS, requires_grad=True) if rank != "3d" else None
    mean, rstd = torch.rand(2, CHANNELS)
    reference = bngrad.torch._clients.ClientReference(client)
    rest = (x.requires_grad_(), weight, mean, rstd, 1e-5, True, reference.name)
    torch.library.opcheck(bngrad.torch.batch_norm_grad, (y_backprop.requires_grad_(), *rest))
    second = (y_backprop, torch.rand(CHANNELS), torch.rand(CHANNELS), y_backprop, *rest)
    detached = tuple(each.detach() if isinstance(each, Tensor) else each for each in second)
    torch.library.opcheck(bngrad.torch.batch_norm_grad_grad, detached)


def test_tensors_without_values_have_gradients_without_values(client: bngrad.Client) -> None:
    layer, x = OURS["4d"](CHANNELS, client=client).to("meta"), torch.empty(SHAPES["4d"], device="meta")
    _, found = gradients(layer, x, torch.empty_like(x))
    assert [each.shape for each in found] == [x.shape, (CHANNELS,), (CHANNELS,)]
    assert all(each.is_meta for each in found)


def test_without_a_gradient_any_dtype_is_taken(client: bngrad.Client) -> None:
    layer = OURS["2d"](CHANNELS, dtype=torch.float64, client=client)
    with torch.no_grad():
        assert layer(torch.randn(4, CHANNELS, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "changes", [{"track_running_stats": False}, {"num_batches_tracked": None}, {"momentum": None}], ids=str
)
def test_a_layer_that_is_changed_later_does_as_pytorchs(
    client: bngrad.Client, changes: dict[str, Any], training: bool
) -> None:
    layers = [randomised(torch.nn.BatchNorm2d(CHANNELS)).train(training) for _ in range(2)]
    bngrad.torch.convert_batchnorm(layers[0], client)
    x, _ = tensors("4d", torch.contiguous_format)
    for layer in layers:
        for name, value in changes.items():
            setattr(layer, name, value)
    ours, theirs = ([layer(x), layer(x + 1), *layer.buffers()] for layer in layers)
    assert all(map(torch.equal, ours, theirs))


def test_a_single_value_per_channel_is_taken_in_evaluation(client: bngrad.Client) -> None:
    layer = OURS["2d"](CHANNELS, client=client).eval()
    assert layer(torch.ones(1, CHANNELS)).shape == (1, CHANNELS)


@pytest.mark.parametrize("where", ["everywhere", "measured"])
def test_a_layer_used_before_its_statistics_change_has_the_gradient_of_that_use(
    client: bngrad.Client, where: Literal["everywhere", "measured"]
) -> None:
    layer = randomised(bngrad.torch.convert_batchnorm(torch.nn.BatchNorm1d(CHANNELS), client, where=where)).eval()
    x, y_backprop = tensors("2d", torch.contiguous_format)
    expected = gradients(layer, x, y_backprop)[1]  # by the client; if measured, it is PyTorch's turn then
    x.requires_grad_()
    y = layer(x)
    layer.train()(x)
    found = list(torch.autograd.grad(y, [x, *layer.parameters()], y_backprop))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_pytorchs_own_cases_agree(client: bngrad.Client, number: int, training: bool) -> None:
    """Runs the inputs of PyTorch's tests of modules, good and bad ones."""
    from torch.testing._internal.common_modules import module_db  # noqa: PLC0415 - it takes seconds

    (info,) = (each for each in module_db if each.name == f"nn.BatchNorm{number}d")
    ours_class = (bngrad.torch.BatchNorm1d, bngrad.torch.BatchNorm2d, bngrad.torch.BatchNorm3d)[number - 1]
    options = {"device": "cpu", "dtype": torch.float32, "requires_grad": True, "training": training}
    for case in info.module_inputs_func(info, **options):
        torch.manual_seed(0)
        constructor, (x,) = case.constructor_input, case.forward_input.args
        ours = ours_class(*constructor.args, **constructor.kwargs, client=client).train(training)
        stock = info.module_cls(*constructor.args, **constructor.kwargs).train(training)
        y_backprop = torch.randn_like(stock(x))
        stock.reset_running_stats()
        found, expected = gradients(ours, x, y_backprop), gradients(stock, x, y_backprop)
        assert torch.equal(found[0], expected[0])
        torch.testing.assert_close(found[1], expected[1])
    for error in info.module_error_inputs_func(info, **options) if training else ():  # they are errors in training
        constructor = error.module_error_input.constructor_input
        ours = ours_class(*constructor.args, **constructor.kwargs, client=client).train(training)
        with pytest.raises(error.error_type, match=error.error_regex):
            ours(*error.module_error_input.forward_input.args)
