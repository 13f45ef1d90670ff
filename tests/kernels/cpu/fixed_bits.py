"""A thousand problems whose bits on a CPU are the same on every processor; a version may change them.

``python -m tests.kernels.cpu.fixed_bits`` writes the file of these bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tests.kernels.backends import create
from tests.kernels.problems import DTYPES, KINDS, outputs

from bngrad_kernels.backend import Backend
from bngrad_kernels.cpu.machine_code.kernels import Kernel
from bngrad_kernels.problem import AnyProblem, GradGradProblem, Problem
from bngrad_kernels.spec import BFLOAT16, FLOAT32, Spec

FILE = Path(__file__).with_name("fixed_bits.txt")
PROBLEMS = 1000
FEW, LONG = (1, 2, 3, 5, 9), (16, 40, 127, 300, 700)
SHAPES = [  # (outer, channels, inner): broken vectors, rows, bands, folds, groups and tiles of both kernels
    *[(outer, channels, 1) for outer in (*FEW, *LONG) for channels in (1, 3, 16, 64, 100, 128, 600)],
    *[(outer, channels, inner) for outer in FEW for channels in (1, 5, 40) for inner in (2, 7, 49, 127, 128, 200, 900)],
    (5000, 64, 1), (3000, 130, 1), (33, 70, 49), (9, 6, 3136), (3, 2, 50_000),
]  # fmt: skip
STREAMED = {4: [(13_000, 64, 1), (16, 64, 800)], 2: [(100_000, 64, 1), (64, 32, 3136)]}
"""By element size: shapes whose outputs bypass the caches."""


class Numbers:
    """Pseudo-random numbers, which NumPy never changes, and exact, so that they are the same on every machine."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.RandomState(seed)

    def array(self, shape: tuple[int, ...], low: float, high: float, dtype: Any) -> Any:
        steps = self.random.randint(0, 1 << 16, shape, np.uint16)
        return (low + (high - low) / (1 << 16) * steps.astype(np.float64)).astype(np.float32).astype(dtype)

    def choice(self, values: Any) -> Any:
        return values[self.random.randint(len(values))]


def problem(number: int) -> AnyProblem:
    """One of the problems: mostly small, of every dtype, order, mode and kind of statistics."""
    numbers = Numbers(number)
    spec = _spec(number, numbers)
    dtype = spec.dtype
    far = numbers.choice([0.0, 0.0, 1000.0])

    def tensor(low: float, high: float) -> Any:
        return numbers.array(spec.shape, low, high, dtype)

    def vector(low: float, high: float) -> Any:
        return numbers.array((spec.channels,), low, high, spec.stats_dtype)

    y_backprop, x, scale = tensor(-2, 2), tensor(far - 3, far + 3), vector(-2, 2)
    reserves = vector(far - 1, far + 1), vector(0.25, 4)
    if spec.order == 1:
        return Problem.allocate(spec, y_backprop, x, numbers.choice([scale, None]), *reserves)
    return GradGradProblem.allocate(spec, tensor(-1, 3), vector(-2, 2), vector(-2, 2), y_backprop, x, scale, *reserves)


def _spec(number: int, numbers: Numbers) -> Spec:
    dtype = DTYPES[number % 3]
    shapes = STREAMED[dtype.itemsize] if number % 100 < 3 else SHAPES
    return Spec(
        dtype,
        numbers.choice(shapes),
        1,
        stats_dtype=numbers.choice([FLOAT32, BFLOAT16]) if dtype == BFLOAT16 else FLOAT32,
        epsilon=numbers.choice([1e-5, 1e-3, 0.1]),
        is_training=numbers.choice([True, True, False]),
        reserve_space_2_kind=numbers.choice(KINDS),
        order=numbers.choice([1, 2]),
    )


def digest(number: int, backend: Backend) -> str:
    """A hash of the bits that a backend computes for a problem."""
    return digests([number], backend)[0]


def digests(numbers: Sequence[int], backend: Backend) -> list[str]:
    """Hashes of the bits that a backend computes for problems, all at once."""
    made = [problem(number) for number in numbers]
    backend.run(made)
    return [_hash(each) for each in made]


def _hash(made: AnyProblem) -> str:
    hashed = hashlib.sha256()
    for output in outputs(made):
        assert np.isfinite(output.astype(np.float32)).all()
        hashed.update(output.tobytes())
    return hashed.hexdigest()[:12]


def expected() -> list[str]:
    """The hash of each problem."""
    return FILE.read_text().split()


def is_for(kernel: Kernel, number: int) -> bool:
    """Whether a kernel computes a problem."""
    spec = _spec(number, Numbers(number))
    return (spec.dtype.name, spec.order) == kernel


if __name__ == "__main__":
    FILE.write_text("".join(digest(number, create("cpu")) + "\n" for number in range(PROBLEMS)))
