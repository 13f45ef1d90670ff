"""A little of everything under compute-sanitizer. `make gpu-test-sanitizer` runs this."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DEVICE = os.environ.get("BNGRAD_TEST_DEVICE", "cpu")
ROOT = Path(__file__).parents[2]
TOOLKITS = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", ""), "/usr/local/cuda", "/opt/cuda"]
TIMEOUT_S = 170
"""So that all tools are done within ten minutes."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cpu", reason="make gpu-test-sanitizer runs it, on a machine with a GPU"),
]


def sanitizer() -> str:
    """Where it is: on the path, or in a toolkit."""
    folders = ("bin", "compute-sanitizer", "extras/compute-sanitizer")
    inside = [f"{toolkit}/{folder}" for toolkit in TOOLKITS for folder in folders if toolkit]
    found = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ["PATH"], *inside]))
    if found is None:
        pytest.skip("compute-sanitizer is neither on the PATH nor in a toolkit: races and stray accesses go unseen")
    return found


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_compute_sanitizer_finds_nothing(tool: str) -> None:
    options = ["--report-api-errors", "no"] if tool == "memcheck" else []  # libraries may try what fails
    watch = [sanitizer(), "--tool", tool, *options, "--error-exitcode", "66"]
    command = [*watch, sys.executable, "-m", "tests.gpu.workload"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=TIMEOUT_S)
    said = done.stdout + done.stderr
    if "Device not supported" in said:
        pytest.skip(f"compute-sanitizer cannot watch this device here: {said[-500:]}")
    assert done.returncode == 0, said[-4000:]
    assert "ERROR SUMMARY: 0 errors" in said or "RACECHECK SUMMARY: 0 hazards" in said, said[-4000:]
