"""A server whose cache has no kernels."""

from __future__ import annotations

import io
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tests.integration.problems import Case, assert_gradients, random_inputs
from tests.kernels.cold_cache import compiling
from tests.servers import ONE_WORKER, run_bngrad, wait_until

import bngrad
from bngrad_cli.embedded import EmbeddedServer
from bngrad_cli.target import wait_until_compiled
from bngrad_kernels.cpu.machine_code import loader, warm
from bngrad_kernels.cpu.machine_code.kernels import KERNELS, host
from bngrad_kernels.spec import BFLOAT16, FLOAT16, FLOAT32

TIMEOUT_S = 60.0
CASE = Case("v3", "NHWC", (2, 3, 3, 8))


def test_a_cold_server_answers_before_a_kernel_is_compiled_and_with_the_same_bits_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    list(warm.fill(host(), warm.missing(host()), jobs=2))
    compiled = loader.path(KERNELS[0], host()).parent
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with compiling(), EmbeddedServer(options=ONE_WORKER) as server, bngrad.Client(server.target) as client:
        assert client.server_info().compiling == tuple(map(str, KERNELS))
        assert "compiling float32-1, bfloat16-1, " in server.stderr()
        in_numpy = [answers(client, dtype) for dtype in (FLOAT32, BFLOAT16, FLOAT16)]
        checked = run_bngrad("check", server.target)
        assert checked.returncode == 0, checked.stdout + checked.stderr
        assert checked.stdout.endswith(" ms (p99), while the server compiles its kernels\n")
        said = io.StringIO()
        waiting = threading.Thread(target=wait_until_compiled, args=(client, Console(file=said)))
        waiting.start()
        wait_until(lambda: said.getvalue().startswith("NumPy computes, more slowly, until "))
        for kernel in KERNELS:
            assert waiting.is_alive() or kernel.order == 2
            shutil.copy(compiled / f"{kernel}.o", loader.path(kernel, host()))
        waiting.join(TIMEOUT_S)
        assert client.server_info().compiling == ()
        assert [answers(client, dtype) for dtype in (FLOAT32, BFLOAT16, FLOAT16)] == in_numpy


def answers(client: bngrad.Client, dtype: np.dtype[Any]) -> list[bytes]:
    spec = CASE.spec(dtype)
    inputs = random_inputs(spec)
    outputs = CASE.run(client, inputs)
    assert_gradients(spec, inputs, outputs)
    return [output.tobytes() for output in outputs]
