"""Data races within a block or between blocks, found by ThreadSanitizer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.kernels.cuda.devices import SOURCES, compile_shared, require_gxx

ROOT = Path(__file__).parents[3]
RACE = 66


def watched(folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs kernels from a folder of sources under ThreadSanitizer."""
    options = ["-O1", "-g", "-fsanitize=thread"]
    library = compile_shared(folder / "watched.so", *options, sources=folder)
    where = ["g++", "-print-file-name=libtsan.so"]
    sanitizer = subprocess.run(where, capture_output=True, text=True, check=True)
    settings = f"halt_on_error=1 exitcode={RACE}"
    environment = os.environ | {"LD_PRELOAD": sanitizer.stdout.strip(), "TSAN_OPTIONS": settings}
    command = [sys.executable, "-m", "tests.kernels.cuda.races", str(library)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=900)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    require_gxx()
    for source in SOURCES.glob("*.cu*"):
        text = source.read_text()
        for others in ("float16, Float16", "bfloat16, BFloat16"):
            text = text.replace(f"BNGRAD_KERNELS({others})\n", "")
        (tmp_path / source.name).write_text(text)
    return tmp_path


def test_the_kernels_have_no_races(sources: Path) -> None:
    done = watched(sources)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize(
    ("source", "right", "wrong"),
    [
        ("sums.cuh", "        __syncthreads();\n", ""),  # between writing shared memory and reading it
        ("streamed.cuh", "add_acq_rel(", "atomicAdd("),  # publishes a tile's sums
        ("streamed.cuh", "                    wait_for_group(d, work_tile.group);\n", ""),
    ],
    ids=["barrier", "order", "wait"],
)
def test_a_missing_synchronisation_is_found(sources: Path, source: str, right: str, wrong: str) -> None:
    text = (sources / source).read_text()
    assert right in text
    (sources / source).write_text(text.replace(right, wrong, 1))
    done = watched(sources)
    assert done.returncode == RACE
    assert "data race" in done.stderr
