"""The help of benchmarks that have no options."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("name", ["bench_cores", "bench_local", "gpu.sweep"])
def test_help_is_printed_and_nothing_is_measured(name: str) -> None:
    command = [sys.executable, "-m", f"benchmarks.{name}", "--help"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith(f"usage: python -m benchmarks.{name} [-h]\n")
