"""CPU kernel time with other constants of `bngrad_kernels.cpu.plan`, such as the prefetch distances, on this processor.

Each --try is a contestant, with the constants that it names. All compute the batch-norm layers of ResNet-50 on the same
memory, in turns, beside the constants as they are. Only constants that change no bits are of use: others are refused.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from unittest import mock

import numpy as np
from benchmarks.kernels import cases

from bngrad_kernels.cpu import plan as plans
from bngrad_kernels.cpu.backend import CpuBackend
from bngrad_kernels.problem import Problem

_CALLS = 4
"""Calls of a turn, of which the first is not counted."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_plan", description=__doc__)
    parser.add_argument("--layout", nargs="+", choices=cases.LAYOUTS, default=cases.LAYOUTS)
    parser.add_argument("--dtype", nargs="+", choices=list(cases.DTYPES), default=["float32", "bfloat16"])
    parser.add_argument(
        "--try",
        dest="tries",
        nargs="+",
        action="append",
        type=_assignment,
        required=True,
        metavar="NAME=VALUE",
        help="for example _FAR_NBYTES=0 _PLANES_FAR_NBYTES=0; may be given several times",
    )
    parser.add_argument("--seconds", type=float, default=5, help="for each layer")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    backend = CpuBackend(options.threads)
    contestants: list[dict[str, int]] = [{}, *map(dict, options.tries)]
    print(backend.description)
    for number, constants in enumerate(contestants):
        print(f"{number}: " + (" ".join(f"{name}={value}" for name, value in constants.items()) or "as it is"))
    print(f"{'milliseconds, median':28}" + "".join(f"{number:>10}" for number in range(len(contestants))) + "   ratios")
    for case in [
        cases.Case(layout, dtype, chw) for layout in options.layout for dtype in options.dtype for chw in cases.RESNET50
    ]:
        medians = _medians(backend, case, contestants, options.seconds)
        ratios = "".join(f"{median / medians[0]:8.2f}" for median in medians[1:])
        print(f"{case!s:28}" + "".join(f"{1e3 * median:10.3f}" for median in medians) + ratios, flush=True)


def _assignment(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    if not isinstance(getattr(plans, name, None), int):
        raise argparse.ArgumentTypeError(f"bngrad_kernels.cpu.plan has no number {name!r}")
    if not value.isdecimal():
        raise argparse.ArgumentTypeError(f"{name} must be a whole number, not {value!r}")
    return name, int(value)


def _medians(
    backend: CpuBackend, case: cases.Case, contestants: Sequence[Mapping[str, int]], seconds: float
) -> list[float]:
    """Returns the seconds of each contestant."""
    dy, x = cases.aligned_empty(case.spec.shape, case.spec.dtype), cases.aligned_empty(case.spec.shape, case.spec.dtype)
    cases.fill(case.spec, dy, x)
    problem = cases.problem(case.spec, dy, x)
    runs = [_bound(backend, problem, constants) for constants in contestants]
    _check_bits(problem, runs)
    times: list[list[float]] = [[] for _ in runs]
    ends_at = time.monotonic() + seconds
    while not times[0] or time.monotonic() < ends_at:
        for i in np.random.default_rng().permutation(len(runs)):
            times[i].extend([_timed(runs[i]) for _ in range(_CALLS)][1:])
    return list(map(statistics.median, times))


def _bound(backend: CpuBackend, problem: Problem, constants: Mapping[str, int]) -> Callable[[], None]:
    plans.plan.cache_clear()
    with mock.patch.dict(vars(plans), constants):
        run = backend.bound_to_team(problem)
    plans.plan.cache_clear()
    return run


def _check_bits(problem: Problem, runs: Sequence[Callable[[], None]]) -> None:
    answers = set()
    for run in runs:
        cases.poison(problem)
        run()
        answers.add((problem.x_backprop.tobytes(), problem.scale_backprop.tobytes(), problem.offset_backprop.tobytes()))
    if len(answers) > 1:
        raise SystemExit("these constants change the bits")


def _timed(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
