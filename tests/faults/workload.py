"""The load's requests: every op, layout and dtype, small and large, with the answers to them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tests.integration.problems import Case, Inputs, random_inputs

import bngrad
from bngrad_kernels.spec import BFLOAT16, FLOAT16, FLOAT32


class Request(NamedTuple):
    """One kind of request, and its frequency relative to the rarest."""

    case: Case
    dtype: np.dtype[Any]
    weight: int


MIX = [
    Request(Case("v2", "NHWC", (2, 5, 5, 3)), FLOAT32, 8),
    Request(Case("v3", "NDHWC", (1, 2, 3, 4, 5)), FLOAT16, 8),
    Request(Case("onednn", "NXC", (16, 64)), BFLOAT16, 8),
    Request(Case("v3", "NHWC", (1, 1, 1, 1)), FLOAT32, 8),
    Request(Case("v2", "NCHW", (4, 64, 2, 2)), BFLOAT16, 8),
    Request(Case("v3", "NHWC", (0, 7, 7, 8)), FLOAT32, 4),
    Request(Case("v2", "NHWC", (8, 14, 14, 64)), FLOAT32, 4),
    Request(Case("v3", "NCDHW", (2, 32, 4, 14, 14)), FLOAT16, 4),
    Request(Case("onednn", "NCX", (8, 48, 28, 14)), FLOAT32, 4),
    Request(Case("v2", "NHWC", (8, 7, 7, 512)), BFLOAT16, 4),
    Request(Case("v3", "NCHW", (16, 64, 28, 28)), BFLOAT16, 2),
    Request(Case("onednn", "NXC", (32, 28, 28, 64)), FLOAT32, 1),
    Request(Case("v2", "NCHW", (16, 64, 56, 56)), FLOAT16, 1),
    Request(Case("v3", "NHWC", (16, 56, 56, 64)), FLOAT32, 1),
]


class Problem(NamedTuple):
    """A request with its inputs, and its outputs when computed alone."""

    request: Request
    inputs: Inputs
    outputs: tuple[Any, ...]

    def is_answered_by(self, outputs: tuple[Any, ...]) -> bool:
        """Whether these outputs have the same bits, shapes and dtypes."""
        pairs = list(zip(outputs, self.outputs, strict=True))
        return all(
            (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
            and np.array_equal(_bytes_of(ours), _bytes_of(theirs))
            for ours, theirs in pairs
        )


def answered_alone(target: str) -> list[Problem]:
    """Makes every request of the mix, one at a time, on an idle server."""
    with bngrad.Client(target, transport="unary") as client:
        problems = []
        for seed, request in enumerate(MIX):
            inputs = random_inputs(request.case.spec(request.dtype), seed)
            problems.append(Problem(request, inputs, tuple(request.case.run(client, inputs))))
        return problems


def save(problems: list[Problem], path: Path) -> None:
    path.write_bytes(pickle.dumps(problems, pickle.HIGHEST_PROTOCOL))


def load(path: Path) -> list[Problem]:
    problems: list[Problem] = pickle.loads(path.read_bytes())  # noqa: S301 - our own
    return problems


def _bytes_of(array: Any) -> Any:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
