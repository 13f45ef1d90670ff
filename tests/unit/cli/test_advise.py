"""The shapes and the verdict of ``bngrad advise``."""

from __future__ import annotations

import click
import pytest

from bngrad_cli.commands.advise import shapes
from bngrad_cli.commands.advise.shapes import DataFormat, Layer
from bngrad_cli.commands.advise.verdict import Times, advise


@pytest.mark.parametrize("data_format", ["NCHW", "NHWC"])
def test_resnet50_has_its_layers_in_either_format(data_format: DataFormat) -> None:
    layers = shapes.resnet50(16, data_format)
    assert sum(layer.count for layer in layers) == 53
    channels = [layer.shape[data_format.index("C")] for layer in layers]
    assert sum(count * layer.count for count, layer in zip(channels, layers, strict=True)) == 26560


def test_shapes_are_read_with_their_counts() -> None:
    assert shapes.parse("2x3x4x5*6, 7x8x1x1") == [Layer((2, 3, 4, 5), 6), Layer((7, 8, 1, 1), 1)]


@pytest.mark.parametrize(
    "text", ["resnet", "2x3x4", "2x3x4x5*", "2x3x4x0", "2x3x4x5*0", "99999x99999x9x9", "", "1x2x3x4,"]
)
def test_other_shapes_are_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="should") as refused:
        shapes.parse(text)
    assert refused.value.format_message().startswith("Invalid value for '--model': ")


def test_a_count_of_none_is_named() -> None:
    with pytest.raises(click.BadParameter, match=r"the count of 2x3x4x5\*0 should be at least one"):
        shapes.parse("2x3x4x5*0")


LAYERS = [Layer((1, 1, 1, 250), 3), Layer((1, 1, 1, 500), 1)]


@pytest.mark.parametrize(
    ("milliseconds", "words", "code"),
    [
        (
            [{"server": 1, "local:": 2, "PyTorch": 4}] * 2,
            "use server for 4 of 4 layers; all backward passes then take 0.25 times",
            'bngrad.torch.convert_batchnorm(model, bngrad.Client("host:1"))',
        ),
        (
            [{"server": 9, "PyTorch": 4}, {"server": 2, "PyTorch": 4}],
            "use server for 1 of 4 layers; all backward passes then take 0.88 times",
            'bngrad.torch.convert_batchnorm(model, bngrad.Client("host:1"), where="measured")',
        ),
        (
            [{"server": 9, "local:": 2, "PyTorch": 4}, {"server": 9, "local:": 4.1, "PyTorch": 4}],
            "use local: for 4 of 4 layers; all backward passes then take 0.63 times",
            'bngrad.torch.convert_batchnorm(model, bngrad.Client("local:"))',
        ),
        ([{"server": 5, "PyTorch": 4}] * 2, "PyTorch alone is the fastest; server takes 1.25 times as long", ""),
        ([{"server": 5, "local:": 4}] * 2, "local: takes 0.80 times as long as server; compare with PyTorch", ""),
        ([{"server": 5}] * 2, "nothing to compare the server with", ""),
    ],
)
def test_the_verdict_is_the_fastest_way(milliseconds: list[dict[str, float]], words: str, code: str) -> None:
    found = advise(Times(LAYERS, milliseconds, 4), "host:1")
    assert words in found.verdict
    assert found.code == code


def test_the_break_even_is_the_bandwidth_that_moves_the_tensors_in_time() -> None:
    # 3 tensors of 1 KB, three times, in 1 us each, and 3 of 2 KB in 3 us
    times = Times(LAYERS, [{"server": 9.0, "local:": 0.001}, {"server": 9.0, "local:": 0.003}], 4)
    assert times.break_even_gigabits() == pytest.approx(8 * (3 * 3e3 + 6e3) / 6e-6 / 1e9)
    assert Times(LAYERS, [{"server": 9.0}] * 2, 4).break_even_gigabits() is None
