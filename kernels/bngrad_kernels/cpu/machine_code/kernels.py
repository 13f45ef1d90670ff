"""The kernels by name, and the processors that they are compiled for.

A kernel is compiled for a level of processors, such as x86-64-v4, rather than for one model: its code is then used on
every processor of that level. Measured on a Xeon, code for the model itself is no faster; and its bits are the same,
but for those of NaNs. On aarch64, neoverse-n1 gains one instruction for each atomic operation of a team; LLVM uses SVE,
which later levels would add, for nothing that takes time.
"""

from __future__ import annotations

import os
import platform
from typing import NamedTuple

import llvmlite.binding as llvm
import numpy as np

from bngrad_kernels import machine
from bngrad_kernels.errors import DeviceUnavailableError
from bngrad_kernels.spec import BFLOAT16, FLOAT16, FLOAT32

ALONE, JOIN, HELP = "alone", "join", "help"
"""The names of a kernel's functions in its object file, which take the address of a `bngrad_kernels.cpu.records.CALL`.

The first one computes the call alone. The second one does so as a member of a team; it also takes the number of the
member, and its own address. The third one takes part in all calls of a team, also by other kernels, as a member, whose
number it takes, and does not return.
"""
_BASE = {"sse3", "ssse3", "sse4.1", "sse4.2", "popcnt", "cx16"}
_V3 = {*_BASE, "avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe"}
LEVELS_OF = {
    "x86_64": {
        "x86-64-v4": {*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
        "x86-64-v3": _V3,
        "x86-64-v2": _BASE,
    },
    "aarch64": {
        "neoverse-n1": {"atomics", "asimddp", "asimdhp", "asimdrdm", "fphp", "lrcpc"},
        "generic": set(),
    },
}
"""By architecture: LLVM's names of the levels, and what a processor has to have, by LLVM's names on x86 and by Linux's
on aarch64, where LLVM looks for a part only.
"""
LEVELS: dict[str, set[str]] = LEVELS_OF.get(platform.machine(), {})
"""The levels of this architecture, the best one first."""


class Kernel(NamedTuple):
    """What is compiled at once: the kernel of an element type and an order of gradients."""

    dtype: str
    order: int

    def __str__(self) -> str:
        return f"{self.dtype}-{self.order}"


KERNELS = tuple(Kernel(dtype.name, order) for order in (1, 2) for dtype in map(np.dtype, (FLOAT32, BFLOAT16, FLOAT16)))
"""All kernels, those first that most requests need."""
FIRST = KERNELS[0]


def host() -> str:
    """The level of this processor; of one that has none, LLVM's name. ``NUMBA_CPU_NAME`` overrides.

    Raises:
        DeviceUnavailableError: NUMBA_CPU_NAME is no name, but a path.
    """
    if name := os.environ.get("NUMBA_CPU_NAME"):
        if "/" in name:
            raise DeviceUnavailableError(
                f"NUMBA_CPU_NAME is {name!r}; it should be a name that LLVM has for processors"
            )
        return name
    features = _features()
    best = next((level for level, needed in LEVELS.items() if needed <= features), None)
    return best or llvm.get_host_cpu_name()


def _features() -> set[str]:
    if platform.machine() == "aarch64":
        return machine.features()
    return {name for name, is_there in llvm.get_host_cpu_features().items() if is_there}
