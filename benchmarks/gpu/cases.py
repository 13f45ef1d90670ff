"""The cases that are timed on a GPU: the batch-norm layers of ResNet-50, and tensors for them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from benchmarks.kernels.cases import DTYPES, LAYOUTS, RESNET50

from bngrad_kernels.spec import Spec

BATCHES = (32, 256)
EPSILON = 1e-5
_TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    layout: str
    dtype: str
    batch: int
    chw: tuple[int, int, int]
    is_training: bool

    @property
    def spec(self) -> Spec:
        channels, height, width = self.chw
        last = self.layout == "NHWC"
        shape = (self.batch, height, width, channels) if last else (self.batch, *self.chw)
        return Spec(DTYPES[self.dtype], shape, 3 if last else 1, epsilon=EPSILON, is_training=self.is_training)

    @property
    def tensor_nbytes(self) -> int:
        return self.spec.tensor_nbytes

    def __str__(self) -> str:
        mode = "training" if self.is_training else "inference"
        return f"{self.layout} {self.dtype:8} {mode:9} {self.batch:4}x{'x'.join(map(str, self.chw))}"


def all_cases(batches: tuple[int, ...] = BATCHES) -> list[Case]:
    return [
        Case(layout, dtype, batch, chw, is_training)
        for is_training, layout, dtype, batch, chw in itertools.product(
            (True, False), LAYOUTS, DTYPES, batches, RESNET50
        )
    ]


class Tensors(NamedTuple):
    """Inputs and outputs on the device, in PyTorch's logical order (N, C, H, W), with any memory layout."""

    y_backprop: torch.Tensor
    x: torch.Tensor
    x_backprop: torch.Tensor
    scale: torch.Tensor
    mean: torch.Tensor
    variance: torch.Tensor
    scale_backprop: torch.Tensor
    offset_backprop: torch.Tensor

    def by_name(self) -> dict[str, torch.Tensor]:
        """By their names in a kernel's descriptor."""
        others = {"mean": "reserve_space_1", "variance": "reserve_space_2"}
        return {others.get(name, name): tensor for name, tensor in self._asdict().items()}


def tensors(case: Case) -> Tensors:
    """Random inputs, and outputs full of NaN."""
    shape = (case.batch, *case.chw)
    form = torch.channels_last if case.layout == "NHWC" else torch.contiguous_format

    def large(mean: float) -> torch.Tensor:
        values = torch.empty(shape, dtype=_TORCH_DTYPES[case.dtype], device="cuda", memory_format=form)
        return values.normal_(mean, 1)

    y_backprop, x = large(0.0), large(0.5)
    variance, mean = torch.var_mean(x.float(), (0, 2, 3), correction=0)
    scale = torch.empty_like(mean).uniform_(0.5, 1.5)
    made = Tensors(
        y_backprop, x, torch.empty_like(x), scale, mean, variance, torch.empty_like(mean), torch.empty_like(mean)
    )
    poison(made)
    return made


def poison(made: Tensors) -> None:
    for output in (made.x_backprop, made.scale_backprop, made.offset_backprop):
        output.fill_(float("nan"))


def wrong(case: Case, made: Tensors) -> str | None:
    """What is wrong with the outputs, compared with float64 on the device; None if they are right."""
    axes = (0, 2, 3)
    dy, xc = made.y_backprop.double(), made.x.double() - made.mean.double().view(1, -1, 1, 1)
    rstd = 1 / torch.sqrt(made.variance.double() + case.spec.epsilon)
    sum_dy, sum_dy_xc = dy.sum(axes), (dy * xc).sum(axes)
    centred = dy
    if case.is_training:
        elements = dy.numel() / dy.shape[1]
        slope = (rstd**2 * sum_dy_xc / elements).view(1, -1, 1, 1)
        centred = dy - (sum_dy / elements).view(1, -1, 1, 1) - xc * slope
    exact = centred * (made.scale.double() * rstd).view(1, -1, 1, 1)
    error = float((made.x_backprop.double() - exact).abs().max() / exact.abs().max())
    allowed = 2.4e-7 + {"float32": 0.0, "float16": 2**-11, "bfloat16": 2**-8}[case.dtype]
    if not error <= allowed:
        return f"x_backprop is off by {error:.1e} of its largest value"
    moduli = dy.abs().sum(axes), (dy * xc).abs().sum(axes) * rstd
    for got, sums, scale in zip(
        (made.offset_backprop, made.scale_backprop), (sum_dy, sum_dy_xc * rstd), moduli, strict=True
    ):
        error = float(((got.double() - sums).abs() / scale).max())
        if not error <= 1e-6:
            return f"a sum is off by {error:.1e} of the sum of its terms"
    return None
