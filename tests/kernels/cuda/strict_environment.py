"""The environment of processes that import the strict stand-in for CuPy instead of CuPy."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parent / "strict"


def environment(kernels: Path, incidents: Path) -> dict[str, str]:
    """What to set.

    Args:
        kernels: The library of `tests.kernels.cuda.devices.compile_shared`.
        incidents: A folder for the files of ``cupy.incidents``; also for the cache, where nothing real may be.
    """
    path = os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {
        "PYTHONPATH": path,
        "EMULATED_KERNELS": str(kernels),
        "EMULATED_INCIDENTS": str(incidents),
        "XDG_CACHE_HOME": str(incidents / "cache"),
    }
