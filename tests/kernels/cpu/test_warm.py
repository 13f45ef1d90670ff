"""The process that compiles kernels in the background of a server."""

from __future__ import annotations

import os
import subprocess
import sys

from bngrad_kernels.cpu.machine_code import warm


def test_it_ends_without_a_word_if_its_server_was_killed_as_it_started() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", warm.__name__],
            stdin=subprocess.PIPE,
            stdout=write,
            stderr=subprocess.PIPE,
            check=False,
        )
    finally:
        os.close(write)
    assert ended.stderr == b""
