"""The second order on a GPU: its tensors, PyTorch's double backward, and a check of the results."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import TypeAlias

import torch
from benchmarks.gpu.cases import EPSILON, Case
from benchmarks.gpu.cases import tensors as first_order_tensors

from bngrad_kernels.problem import GradGradProblem
from bngrad_kernels.spec import Spec

Named: TypeAlias = dict[str, torch.Tensor]

CASES = [
    Case(layout, dtype, 32, chw, True)
    for layout, dtype, chw in itertools.product(
        ("NHWC", "NCHW"), ("float32", "bfloat16"), [(64, 112, 112), (256, 56, 56), (512, 28, 28), (2048, 7, 7)]
    )
]
_INPUTS = ("y_backprop", "x", "scale")
_GRADIENTS = ("grad_x_backprop", "grad_scale_backprop", "grad_offset_backprop")
_OUTPUTS = GradGradProblem.large_outputs + GradGradProblem.small_outputs


def spec_of(case: Case) -> Spec:
    return dataclasses.replace(case.spec, order=2)


def tensors(case: Case) -> Named:
    """Random inputs, and outputs full of NaN, by their names in a kernel's descriptor."""
    first = first_order_tensors(case).by_name()
    large, vector = first["x"], first["scale"]
    made = {name: first[name] for name in (*_INPUTS, "reserve_space_1", "reserve_space_2")}
    made["grad_x_backprop"] = torch.empty_like(large).normal_()
    made |= {name: torch.empty_like(vector).uniform_(0.5, 1.5) for name in _GRADIENTS[1:]}
    made |= {name: torch.empty_like(large) for name in GradGradProblem.large_outputs}
    made["grad_scale"] = torch.empty_like(vector)
    poison(made)
    return made


def poison(made: Named) -> None:
    for name in _OUTPUTS:
        made[name].fill_(float("nan"))


def pytorch(case: Case, made: Named) -> Callable[[], tuple[torch.Tensor, ...]]:
    """PyTorch's double backward, with the graph of the first order built before."""
    dy, x, scale = (made[name].detach().requires_grad_() for name in _INPUTS)
    offset = torch.zeros_like(scale).requires_grad_()
    y = torch.nn.functional.batch_norm(x, None, None, scale, offset, training=case.is_training, eps=EPSILON)
    first = torch.autograd.grad(y, (x, scale, offset), dy, create_graph=True)
    gradients = [made[name] for name in _GRADIENTS]
    return lambda: torch.autograd.grad(first, (dy, x, scale), gradients, retain_graph=True)


def wrong(case: Case, made: Named) -> str | None:
    """What is wrong with the outputs, compared with float64 on the device; None if they are right."""
    doubles = {name: made[name].double() for name in (*_INPUTS, *_GRADIENTS)}
    exact = pytorch(case, doubles)()
    rounding = {"float32": 0.0, "float16": 2**-11, "bfloat16": 2**-8}[case.dtype]
    for name, right in zip(_OUTPUTS, exact, strict=True):
        allowed = 1e-6 + (rounding if made[name].dim() > 1 else 0)
        error = float((made[name].double() - right).abs().max() / right.abs().max())
        if not error <= allowed:
            return f"{name} is off by {error:.1e} of its largest value"
    return None
