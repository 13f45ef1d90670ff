"""Compiles the kernels that a wheel brings along: ``python -m bngrad_kernels.cpu.machine_code.ship FOLDER``.

A server installed from such a wheel computes at once. `hatch_build.py` puts the folder into the wheel.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from bngrad_kernels import compiled_code
from bngrad_kernels.cpu.machine_code import cache, loader, warm
from bngrad_kernels.cpu.machine_code.kernels import KERNELS, LEVELS

SHIPPED_LEVELS = tuple(LEVELS)[:2]
"""The levels of this architecture that most processors have."""


def ship(target: Path) -> None:
    """Writes the kernels for two levels of this architecture to a folder.

    Raises:
        SystemExit: One cannot be compiled.
    """
    for level in SHIPPED_LEVELS:
        for _, failure in warm.fill(level, warm.missing(level), len(os.sched_getaffinity(0))):
            if failure:
                raise SystemExit(failure)
        folder = target / cache.sources() / level
        folder.mkdir(parents=True)
        for kernel in KERNELS:
            code = loader.compiled(kernel, level)
            assert code is not None
            compiled_code.write(folder / f"{kernel}.o", code)


if __name__ == "__main__":
    ship(Path(sys.argv[1]))
