"""Accesses to shared memory that no barrier orders, found by ThreadSanitizer: CUDA threads are OS threads here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.kernels.cuda.devices import SOURCES, compile_shared, require_gxx

ROOT = Path(__file__).parents[4]
RACE = 66


def watched(folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs kernels from a folder of sources under ThreadSanitizer."""
    options = ["-O1", "-g", "-fsanitize=thread"]
    library = compile_shared(folder / "watched.so", *options, sources=folder)
    where = ["g++", "-print-file-name=libtsan.so"]
    sanitizer = subprocess.run(where, capture_output=True, text=True, check=True)
    environment = os.environ | {"LD_PRELOAD": sanitizer.stdout.strip(), "TSAN_OPTIONS": f"exitcode={RACE}"}
    command = [sys.executable, "-m", "tests.unit.kernels.cuda.races", str(library)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=900)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    require_gxx()
    for source in SOURCES.glob("*.cu*"):
        shutil.copy(source, tmp_path)
    return tmp_path


def test_the_kernels_have_no_races_in_shared_memory(sources: Path) -> None:
    done = watched(sources)
    assert done.returncode == 0, done.stderr[-4000:]


def test_a_missing_barrier_would_be_seen(sources: Path) -> None:
    text = (sources / "sums.cuh").read_text()
    assert text.count("    __syncthreads();\n") == 4
    (sources / "sums.cuh").write_text(text.replace("    __syncthreads();\n", "", 1))
    done = watched(sources)
    assert done.returncode == RACE
    assert "data race" in done.stderr
