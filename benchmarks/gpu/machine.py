"""The device, versions and sources that the numbers of a GPU run depend on."""

from __future__ import annotations

import platform
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bngrad_kernels.cuda import compiler
from bngrad_kernels.cuda.device import CupyDevice


def describe(device: CupyDevice, commit: str | None) -> dict[str, Any]:
    """The device, the versions of what runs on it, and which sources ran: `commit`, or what git says if None."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    smi = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm,clocks.max.mem,power.limit", "--format=csv"]
    return {
        "device": device.description,
        "processors": device.traits.processors,
        "cache_nbytes": device.traits.cache_nbytes,
        "nvidia_smi": _output(smi),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "nvrtc": ".".join(map(str, compiler.compiler_version())),
        "commit": commit or _output(git) or "unknown",
        "kernels": compiler.fingerprint(),
        "utc": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
    }


def _output(command: list[str]) -> str:
    """The output of a command; empty if it is missing or fails."""
    if shutil.which(command[0]) is None:
        return ""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
