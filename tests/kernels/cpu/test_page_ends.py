"""Where arrays end at memory that may not be touched, as they do in the files that clients share with a server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_kernels_read_and_write_nothing_beyond_their_arrays() -> None:
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.kernels.cpu.page_ends"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert ended.returncode == 0, (ended.stdout.splitlines()[-1:], ended.stderr)
