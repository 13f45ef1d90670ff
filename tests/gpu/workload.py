"""``python -m tests.gpu.workload`` computes a little of everything, for a sanitizer to watch."""

from __future__ import annotations

import itertools

from tests.kernels.cuda.devices import cuda_backend
from tests.kernels.problems import DTYPES, MODES, ORDERS, assert_right, random_problem, spec_of

SHAPES = [(3, 5, 1), (700, 64, 1), (300, 17, 1), (40, 24, 9), (7, 100, 49), (9, 6, 196), (9, 3, 1023), (2, 3, 4000)]


def main() -> None:
    problems = [random_problem(spec_of(order, shape, dtype, is_training=is_training))
                for order, dtype, shape, is_training in itertools.product(ORDERS, DTYPES, SHAPES, MODES)]  # fmt: skip
    cuda_backend(blocks=20).run(problems)
    assert_right(*problems)


if __name__ == "__main__":
    main()
