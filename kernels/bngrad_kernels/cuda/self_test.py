"""The self-test of a GPU: every kernel computes small problems, which are compared with the reference.

The shapes reach every kernel, and tiles whose blocks wait for each other. Each problem is computed alone, then all in
one batch, whose bits must be the same; then one is copied from and to page-locked memory, and computed once more with a
copy ahead of x. A GPU that fails is not used.
"""

from __future__ import annotations

import dataclasses
import itertools
import mmap
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from bngrad_kernels import tolerances
from bngrad_kernels.problem import AnyProblem, Array, GradGradProblem, Problem
from bngrad_kernels.spec import FLOAT32, TENSOR_DTYPES, Spec

SHAPES = [
    (400, 64, 1),  # channels last: vectors, several tiles
    (20, 30, 1),  # the same, element by element
    (4, 16, 49),  # channels first, several channels a group
    (3, 3, 600),  # channels first, a channel a group: vectors
    (3, 3, 515),  # the same, element by element
]
LARGE_SHAPES = [(20_000, 96, 1), (30_001, 5, 1), (64, 256, 49), (16, 8, 3136), (2, 2048, 1)]
"""Those of the long form, in addition."""
_PAGE_LOCKED = Spec(FLOAT32, (1100, 64, 1), 1)
"""Large enough for each tensor to be copied directly, not together with others."""
_LIMIT_S = 60.0


class SelfTestError(Exception):
    """A step of the self-test failed; the message says which, and how."""


class Computer(Protocol):
    """What computes the problems of the self-test: a GPU's backend."""

    errors: tuple[type[Exception], ...]
    """The exceptions of the device."""

    def compute(self, problems: Sequence[AnyProblem], *, is_streamed: bool) -> None:
        """Writes the outputs, without the resident kernel if ``is_streamed``."""

    def kernel_of(self, problem: AnyProblem, *, is_streamed: bool) -> str:
        """The name of the kernel that `compute` uses."""

    def register(self, memory: Array) -> None:
        """Page-locks memory."""

    def unregister(self, memory: Array) -> None:
        """Undoes `register`."""

    def copy_ahead(self, memory: Array) -> Any | None:
        """Begins to copy an input."""


def run(computer: Computer, *, is_long: bool = False, limit_s: float = _LIMIT_S) -> int:
    """Runs the self-test, and returns how many problems were computed.

    Args:
        computer: What is tested.
        is_long: Also computes large problems, which takes seconds instead of milliseconds.
        limit_s: How long it may take, in seconds, before a kernel is said to hang.

    Raises:
        SelfTestError: A result is wrong, a kernel failed, or did not end in time.
        MemoryError: The device does not have enough memory.
    """
    test = _SelfTest(computer, is_long)
    thread = threading.Thread(target=test.run, name="self-test", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        raise SelfTestError(f"{test.step} did not end within {limit_s:g} s")
    if test.error is not None:
        raise test.error
    return test.count


class _SelfTest:
    """One run.

    Attributes:
        step: What is done now.
        count: How many problems were computed.
        error: Why it failed, once it has ended.
    """

    def __init__(self, computer: Computer, is_long: bool) -> None:
        self.step = "the start"
        self.count = 0
        self.error: BaseException | None = None
        self._computer = computer
        self._shapes = SHAPES + LARGE_SHAPES * is_long

    def run(self) -> None:
        try:
            self._check()
        except self._computer.errors as error:
            self.error = SelfTestError(f"{self.step} failed: {error}")
        except BaseException as error:
            self.error = error

    def _check(self) -> None:
        problems = [random_problem(spec) for spec in _specs(self._shapes)]
        expected = [self._by_each_kernel(problem) for problem in problems]
        self._batch("a batch of all kernels", problems, expected)
        self._page_locked()

    def _by_each_kernel(self, problem: AnyProblem) -> list[bytes]:
        """The bits of a problem, which are the same by the resident kernel and by the streamed one."""
        names = {self._computer.kernel_of(problem, is_streamed=choice): choice for choice in (True, False)}
        bits = [self._alone(problem, name, is_streamed=choice) for name, choice in names.items()]
        if bits[0] != bits[-1]:
            raise SelfTestError(f"kernels {' and '.join(names)} differ in bits, {_described(problem.spec)}")
        return bits[0]

    def _alone(self, problem: AnyProblem, name: str, *, is_streamed: bool) -> list[bytes]:
        self.step = f"kernel {name}, {_described(problem.spec)},"
        _clear(problem)
        self._computer.compute([problem], is_streamed=is_streamed)
        self.count += 1
        for output, error, bound in _errors(problem):
            if not error <= bound:  # NaN neither
                found = "is NaN" if np.isnan(error) else f"is off by {error:.1e}, more than {bound:.1e}"
                raise SelfTestError(f"{self.step} is wrong: {output} {found}")
        return _bits(problem)

    def _batch(self, step: str, problems: Sequence[AnyProblem], expected: Sequence[list[bytes]]) -> None:
        self.step = step
        for problem in problems:
            _clear(problem)
        self._computer.compute(problems, is_streamed=False)
        self.count += len(problems)
        for problem, bits in zip(problems, expected, strict=True):
            if _bits(problem) != bits:
                raise SelfTestError(f"{step} is wrong: {_described(problem.spec)} has other bits than alone")

    def _page_locked(self) -> None:
        """Compares a problem in page-locked memory with one that is not; where that is refused, a server says so."""
        plain, spec = random_problem(_PAGE_LOCKED), _PAGE_LOCKED
        assert isinstance(plain, Problem)
        expected = self._alone(plain, self._computer.kernel_of(plain, is_streamed=False), is_streamed=False)
        memory = np.frombuffer(mmap.mmap(-1, 3 * spec.tensor_nbytes), np.uint8)
        try:
            self._computer.register(memory)
        except self._computer.errors:
            return
        try:
            large = memory.view(spec.dtype).reshape(3, *spec.shape)
            large[:2] = plain.y_backprop, plain.x
            small = plain.scale, plain.reserve_space_1, plain.reserve_space_2
            outputs = np.empty_like(plain.scale_backprop), np.empty_like(plain.offset_backprop)
            locked = Problem(spec, large[0], large[1], *small, large[2], *outputs)
            self._batch("a copy of page-locked memory", [locked], [expected])
            self.step = "a copy ahead"
            locked.on_device = {"x": self._computer.copy_ahead(large[1].reshape(-1).view(np.uint8))}
            self._batch(self.step, [locked], [expected])
        finally:
            self._computer.unregister(memory)


def _specs(shapes: Sequence[tuple[int, ...]]) -> Iterator[Spec]:
    for order, dtype, is_training, shape in itertools.product((1, 2), TENSOR_DTYPES, (True, False), shapes):
        yield Spec(dtype, shape, 1, is_training=is_training, order=order)


def random_problem(spec: Spec) -> AnyProblem:
    """A problem of random numbers, the same ones each time."""
    rng = np.random.default_rng(0)

    def tensor(mean: float) -> Array:
        return rng.normal(mean, 1, spec.shape).astype(spec.dtype)

    def vector(low: float, high: float) -> Array:
        return rng.uniform(low, high, spec.channels).astype(spec.stats_dtype)

    stats = vector(0.5, 1.5), vector(0.4, 0.6), vector(0.8, 1.2)
    if spec.order == 1:
        return Problem.allocate(spec, tensor(0.1), tensor(0.5), *stats)
    return GradGradProblem.allocate(spec, tensor(-0.2), vector(-1, 1), vector(-1, 1), tensor(0.1), tensor(0.5), *stats)


def _errors(problem: AnyProblem) -> Iterator[tuple[str, float, float]]:
    """The name, error and bound of each output."""
    names = (*problem.large_outputs, *problem.small_outputs)
    outputs = tuple(getattr(problem, name) for name in names)
    inputs = {name: getattr(problem, name) for name in (*problem.large_inputs, *problem.small_inputs)}
    given = tuple(inputs[field.name] for field in dataclasses.fields(problem) if field.name in inputs)
    is_first = problem.spec.order == 1
    compared = (tolerances.errors if is_first else tolerances.grad_grad_errors)(problem.spec, given, outputs)
    bounds = (tolerances.bounds if is_first else tolerances.grad_grad_bounds)(problem.spec)
    return zip(names, compared, bounds, strict=True)


def _clear(problem: AnyProblem) -> None:
    for name in (*problem.large_outputs, *problem.small_outputs):
        getattr(problem, name).fill(np.nan)


def _bits(problem: AnyProblem) -> list[bytes]:
    return [getattr(problem, name).tobytes() for name in (*problem.large_outputs, *problem.small_outputs)]


def _described(spec: Spec) -> str:
    return f"{spec.dtype.name} {spec.shape} in {'training' if spec.is_training else 'inference'}"
