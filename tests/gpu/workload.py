"""``python -m tests.gpu.workload`` computes a little of everything, for a sanitizer to watch."""

from __future__ import annotations

import itertools

from tests.unit.kernels import second_order
from tests.unit.kernels.cuda.devices import backend
from tests.unit.kernels.problems import DTYPES, assert_right, problem

from bngrad_kernels.spec import Spec

SHAPES = [(3, 5, 1), (700, 64, 1), (300, 17, 1), (40, 24, 9), (7, 100, 49), (9, 6, 196), (9, 3, 1023), (2, 3, 4000)]


def main() -> None:
    kinds = list(itertools.product(DTYPES, SHAPES, (True, False)))
    first = [problem(Spec(dtype, shape, 1, is_training=is_training)) for dtype, shape, is_training in kinds]
    second = [second_order.problem(second_order.second(shape, dtype, is_training=is_training))
              for dtype, shape, is_training in kinds]  # fmt: skip
    backend(blocks=20).run([*first, *second])
    for made in first:
        assert_right(made)
    for made_second in second:
        second_order.assert_right(made_second)


if __name__ == "__main__":
    main()
