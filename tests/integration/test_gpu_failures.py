"""Servers whose GPU fails: CuPy's strict stand-in runs the device's own code, and makes the incidents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.problems import assert_gradients, assert_same_bits, random_inputs
from tests.kernels.cuda.devices import library_file
from tests.kernels.cuda.strict_environment import environment
from tests.servers import run_at_start, wait_until

import bngrad
from bngrad_cli.embedded import EmbeddedServer, ServerStartError
from bngrad_kernels.spec import FLOAT32, Spec

ARENA = ("--arena-bytes", "64MiB")
SPEC = Spec(FLOAT32, (4, 9, 9, 48), 3)
INPUTS = random_inputs(SPEC)
SHORT_TIMEOUT = """
import sys
if "serve" in sys.argv:
    from bngrad_server.workers import worker_slot
    worker_slot._BATCH_TIMEOUT_S = 8.0  # a busy machine takes some seconds over a batch
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where files make incidents, in the servers that the tests start."""
    made = tmp_path_factory.mktemp("incidents")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(library_file(), made).items():
            patch.setenv(name, value)
        yield made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(device="cuda:0", options=ARENA) as server:
        yield server


def test_a_gpu_that_computes_wrong_numbers_ends_the_server_with_a_sentence(folder: Path) -> None:
    incident = folder / "nothing is written"
    incident.write_text("second_bfloat16_training_elements always")
    with pytest.raises(ServerStartError) as raised, EmbeddedServer(device="cuda:0", options=ARENA):
        pass
    incident.unlink()
    last = str(raised.value).splitlines()[-1]
    assert last.startswith("Error: device cuda:0 cannot be used: strict GPU, 8 GiB, compute capability 9.0, driver")
    assert "failed its self-test: kernel second_bfloat16_training_elements, bfloat16" in last
    assert "Traceback" not in str(raised.value)


def test_a_gpu_that_passes_its_self_test_computes(server: EmbeddedServer) -> None:
    assert "passed its self-test" in server.stderr()
    with bngrad.Client(server.target) as client:
        assert_gradients(SPEC, INPUTS, client.fused_batch_norm_grad_v2(*INPUTS))


def test_no_request_is_lost_when_a_launch_fails(server: EmbeddedServer, folder: Path) -> None:
    check_nothing_is_lost(server, folder / "launch fails", "CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure")


def test_no_request_is_lost_when_a_gpu_hangs(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_at_start(SHORT_TIMEOUT, tmp_path, monkeypatch)
    with EmbeddedServer(device="cuda:0", options=ARENA) as server:
        check_nothing_is_lost(server, folder / "hangs", "for taking too long over a batch")


def check_nothing_is_lost(server: EmbeddedServer, incident: Path, sentence: str) -> None:
    """Checks that a request outlasts the incident, for which the log has a sentence."""
    with bngrad.Client(server.target) as client:
        before, restarts = client.fused_batch_norm_grad_v2(*INPUTS), client.server_info().devices[0].restarts
        incident.write_text("first_float32")
        assert_same_bits(client.fused_batch_norm_grad_v2(*INPUTS, timeout=60), before)
        assert client.server_info().devices[0].restarts > restarts
        wait_until(lambda: sentence in server.stderr())
        wait_until(lambda: client.server_info().devices[0].state == "ready")


def test_no_request_is_lost_when_memory_runs_short(server: EmbeddedServer, folder: Path) -> None:
    spec = Spec(FLOAT32, (50, 40, 40, 64), 3)
    inputs = random_inputs(spec)
    with bngrad.Client(server.target) as client:
        before, restarts = client.fused_batch_norm_grad_v2(*inputs), client.server_info().devices[0].restarts
        incident = folder / "memory"
        incident.write_text(str(12 << 20))
        assert_same_bits(client.fused_batch_norm_grad_v2(*inputs), before)
        incident.unlink()
        assert client.server_info().devices[0].restarts == restarts
