"""The process that compiles kernels in the background of a server, and ``bngrad warm``."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from tests.servers import BNGRAD, TIMEOUT_S, children_of, interruptible, wait_until

from bngrad_kernels import compiled_code
from bngrad_kernels.cpu.machine_code import loader, warm
from bngrad_kernels.cpu.machine_code.kernels import KERNELS, Kernel, host


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


def test_ctrl_c_ends_the_command_with_the_kernel_that_it_compiles(tmp_path: Path) -> None:
    assert not [failure for _, failure in warm.fill(host(), warm.missing(host()), jobs=1) if failure]
    quick = Kernel("float32", 2)  # compiled soonest
    present = [loader.path(kernel, host()) for kernel in KERNELS if kernel != quick]
    folder = tmp_path / present[0].parent.relative_to(compiled_code.cache_folder().parent)
    folder.mkdir(parents=True)
    for path in present:
        shutil.copy(path, folder)
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    with interruptible([*BNGRAD, "warm", "--jobs", "1"], stderr=subprocess.PIPE, env=environment) as process:
        wait_until(lambda: children_of(process.pid, "bngrad_kernels.cpu.machine_code.compiler"))
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, errors) == (130, "")
    assert (folder / f"{quick}.o").exists()
