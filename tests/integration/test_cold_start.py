"""A server whose cache has no kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integration.problems import Case, assert_gradients, random_inputs
from tests.servers import ONE_WORKER, wait_until

import bngrad
from bngrad_cli.embedded import EmbeddedServer
from bngrad_kernels.spec import BFLOAT16, FLOAT32


def test_a_cold_server_serves_before_all_is_compiled_and_a_request_waits_for_its_own_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    case = Case("v3", "NHWC", (2, 3, 3, 8))
    with EmbeddedServer(options=ONE_WORKER) as server, bngrad.Client(server.target, timeout=300) as client:
        said = "compiling 5 more kernels in the background: bfloat16-1, "
        wait_until(lambda: said in server.stderr(), timeout_s=300)  # at the lowest priority
        assert "float32-2" in client.server_info().compiling
        for dtype in (FLOAT32, BFLOAT16):
            spec = case.spec(dtype)
            inputs = random_inputs(spec)
            assert_gradients(spec, inputs, case.run(client, inputs))
