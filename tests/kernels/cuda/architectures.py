"""The architectures that test_compiler.py compiles the CUDA kernels for.

NVIDIA's compiler takes up to two minutes for each. So ``make cuda-architectures`` notes with which sources, tests and
compiler all have passed. As long as these stay as they are, the tests compile the kernels for float32 alone, and for
one architecture.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from bngrad_kernels.cuda import compiler

ALL = (70, 75, 80, 90, 100, 120)
ONE = 90
_TESTS = Path(__file__).with_name("test_compiler.py")
_NOTE = Path(__file__).with_name("architectures.json")


def state() -> dict[str, object]:
    """What the kernels compile by."""
    return {
        "architectures": list(ALL),
        "sources": compiler.fingerprint(),
        "tests": hashlib.sha256(_TESTS.read_bytes()).hexdigest(),
        "nvrtc": ".".join(map(str, compiler.compiler_version())),
    }


def noted() -> dict[str, object]:
    """What they compiled by for all architectures."""
    return dict(json.loads(_NOTE.read_text())) if _NOTE.exists() else {}


if __name__ == "__main__":
    _NOTE.write_text(json.dumps(state(), indent=2) + "\n")
