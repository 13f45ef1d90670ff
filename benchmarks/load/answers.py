"""The outcomes of requests, and bit-exact checks of answers."""

from __future__ import annotations

import enum
import itertools

import numpy as np
from benchmarks.kernels import cases

from bngrad_kernels.problem import Array, Problem

_SAMPLE = 64
"""The number of elements that a check compares; every ``_WHOLE_EVERY``-th answer is compared whole."""
_WHOLE_EVERY = 64


class WrongAnswerError(Exception):
    """An idle server gave a wrong answer."""


class Status(enum.IntEnum):
    OK = 0
    WRONG = 1
    RESOURCE_EXHAUSTED = 2
    DEADLINE_EXCEEDED = 3
    UNAVAILABLE = 4
    OTHER = 5
    NOT_SENT = 6  # its timeout passed before a caller was free to send it


def check_quiet_answer(what: str, problem: Problem, gradients: tuple[Array, Array, Array]) -> None:
    """Compares with the float64 reference."""
    fault = cases.wrong(problem, gradients)
    if fault is not None:
        raise WrongAnswerError(f"{what}: {fault}")


class Expected:
    """The tensor expected in every answer to a kind of request."""

    def __init__(self, array: Array) -> None:
        self._bits = _bits(array).copy()
        self._stride = max(1, self._bits.size // _SAMPLE)
        self._spoilt = np.iinfo(self._bits.dtype).max
        self._checks = itertools.count(1)

    def is_in(self, array: Array) -> bool:
        """Compares bits, and overwrites those compared, since the memory is reused and must be written again."""
        stride = 1 if next(self._checks) % _WHOLE_EVERY == 0 else self._stride
        seen = _bits(array)[::stride]
        right = np.array_equal(seen, self._bits[::stride])
        seen[:] = self._spoilt
        return right


def _bits(array: Array) -> Array:
    bits: Array = array.reshape(-1).view(f"u{array.dtype.itemsize}")
    return bits
