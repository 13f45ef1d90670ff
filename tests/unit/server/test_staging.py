from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import pytest

from bngrad_kernels.spec import BFLOAT16, FLOAT16, FLOAT32, Spec
from bngrad_server.arena import ALIGNMENT
from bngrad_server.staging import staged_nbytes, staged_problem


@pytest.mark.parametrize(
    "spec",
    [
        Spec(FLOAT32, (2, 3, 5, 7), 3),
        Spec(FLOAT16, (1, 1, 1, 1), 3),
        Spec(BFLOAT16, (9, 33), 1, stats_dtype=BFLOAT16),
        Spec(FLOAT32, (0, 3, 5, 7), 3),
        Spec(FLOAT32, (2, 0, 5, 7), 1),
    ],
)
def test_the_arrays_of_a_block_are_aligned_and_disjoint(spec: Spec) -> None:
    offset = 3 * ALIGNMENT
    buffer = mmap.mmap(-1, offset + staged_nbytes(spec) + ALIGNMENT)
    problem = staged_problem(buffer, offset, spec, has_scale=True)
    arrays: list[np.ndarray[Any, Any]] = [
        *(problem.y_backprop, problem.x, problem.x_backprop),
        *(problem.scale, problem.reserve_space_1, problem.reserve_space_2),  # type: ignore[list-item]
        *(problem.scale_backprop, problem.offset_backprop),
    ]
    for number, array in enumerate(arrays, 1):
        array.view(np.uint8)[...] = number
    for number, array in enumerate(arrays, 1):
        assert (array.view(np.uint8) == number).all()
        assert (
            array.size == 0 or array.ctypes.data % ALIGNMENT == np.ndarray(1, np.uint8, buffer).ctypes.data % ALIGNMENT
        )
    assert not any(buffer[:offset])
    assert not any(buffer[offset + staged_nbytes(spec) :])


def test_without_scale_the_problem_has_none() -> None:
    spec = Spec(FLOAT32, (2, 3), 1)
    assert staged_problem(mmap.mmap(-1, staged_nbytes(spec)), 0, spec, has_scale=False).scale is None
