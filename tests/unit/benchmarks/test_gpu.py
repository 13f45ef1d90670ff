"""The GPU benchmark's parts that need no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import bench_gpu

ROOT = Path(__file__).parents[3]


def test_a_failing_case_is_reported_and_the_others_run(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> list[bench_gpu.Row]:
        raise RuntimeError("out of memory")

    assert bench_gpu._measured("a", fail) == [{"case": "a", "wrong": "RuntimeError: out of memory"}]
    assert bench_gpu._measured("b", lambda: [{"case": "b", "seconds": 1.0}]) == [{"case": "b", "seconds": 1.0}]
    assert "in fail" in capsys.readouterr().err


@pytest.mark.parametrize("error", [MemoryError("12 GiB"), torch.cuda.OutOfMemoryError("12 GiB")])
def test_a_case_for_which_memory_is_short_is_skipped_and_not_wrong(error: Exception) -> None:
    def fail() -> list[bench_gpu.Row]:
        raise error

    assert bench_gpu._measured("a", fail) == [{"case": "a", "skipped": "out of memory: 12 GiB"}]


def test_installed_packages_of_the_same_names_are_not_imported(tmp_path: Path) -> None:
    for name in ("benchmarks", "tests"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    path = os.pathsep.join(
        [*(str(ROOT / part) for part in ("client", "server", "kernels", "protos", ".")), str(tmp_path)]
    )
    code = "import benchmarks.gpu, tests.gpu.workload"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr
