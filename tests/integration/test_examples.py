"""The examples and the demo, run as a user runs them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tests.servers import BNGRAD, TIMEOUT_S, interruptible, is_running, wait_until

from bngrad_cli.embedded import EmbeddedServer

EXAMPLES = Path(__file__).parents[2] / "examples"
DIGITS = Path(__file__).parents[2] / "cli" / "bngrad_cli" / "commands" / "digits.npz"


def output_of(*command: object) -> str:
    # PyTorch's idle threads would spin, and take the cores from the server.
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
    arguments = [sys.executable, *map(str, command)]
    return subprocess.run(arguments, check=True, capture_output=True, text=True, env=environment).stdout


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("quickstart", "BatchNormTrainingBackprop"),
        ("async_client", "batch 7"),
        ("shared_memory", "3 x 26 MB: arrays in shared memory"),
        ("pytorch_gradient", "torch.bfloat16, torch.channels_last: differs from PyTorch's by"),
        ("train_digits_torch", "the losses differ by"),
        ("train_digits_keras", "the losses differ by"),
        ("train_digits_jax", "the losses differ by"),
        ("tensorflow_gradient", "gradient of scale: (64,), differs from TensorFlow's by"),
    ],
)
def test_an_example_runs_against_a_server(server: EmbeddedServer, name: str, words: str) -> None:
    assert words in output_of(EXAMPLES / f"{name}.py", server.target)


NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))


@pytest.fixture(scope="module")
def runs() -> dict[str, list[Any]]:
    """What comes of each example with --help, with wrong arguments, and with a server that is not there."""
    lists = {name: [["--help"], ["localhost:1", "2", "three"], ["localhost:1"]] for name in NAMES}
    for name in ("plot_losses", "record_digits"):
        lists[name].pop()
    command = [sys.executable, "-m", "tests.integration.run_examples", json.dumps(lists)]
    ended = subprocess.run(command, check=True, capture_output=True, text=True, cwd=EXAMPLES.parent)
    results: dict[str, list[Any]] = json.loads(ended.stdout)
    return results


@pytest.mark.parametrize("name", NAMES)
def test_an_example_has_help_refuses_wrong_arguments_and_says_that_there_is_no_server(
    runs: dict[str, list[Any]], name: str
) -> None:
    helped, refused, *alone = runs[name]
    assert helped[0] == 0, helped
    assert name in helped[1]
    assert refused[:2] == [2, ""]
    assert name in refused[2]
    assert "Traceback" not in refused[2]
    for status, output, errors in alone:
        assert (status, output) == (1, "")
        assert "Connection refused" in errors
        assert "Traceback" not in errors


def test_the_quickstart_starts_a_server_of_its_own() -> None:
    assert "FusedBatchNormGradV2" in output_of(EXAMPLES / "quickstart.py")


def test_the_quickstart_says_which_extra_its_server_needs(tmp_path: Path) -> None:
    (tmp_path / "pydantic.py").write_text("raise ModuleNotFoundError(name='pydantic')")
    command = [sys.executable, str(EXAMPLES / "quickstart.py")]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("quickstart.py: the server did not start:\n")
    assert "pip install '.[server]'" in ended.stderr


def test_the_demo_finds_every_answer_within_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")  # the table is wider, and keeps its numbers
    output = output_of("-m", "bngrad_cli", "demo")
    assert "All 9 answers are within their bounds." in output
    assert re.search(r"32x56x56x64 bfloat16 NHWC +[0-9.]+ +[0-9.]+ [0-9.e-]+ [0-9.e-]+ *\n", output)
    assert max(map(len, output.splitlines())) <= 80


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_the_server_of_a_demo_does_not_outlive_it(number: int, code: int) -> None:
    with interruptible([*BNGRAD, "demo"], stderr=subprocess.PIPE) as demo:
        assert demo.stdout is not None
        assert any(line.startswith("Ready on ") for line in demo.stdout)
        processes = psutil.Process(demo.pid).children(recursive=True)
        assert len(processes) > 2
        demo.send_signal(number)
        _, errors = demo.communicate(timeout=TIMEOUT_S)
        assert (demo.returncode, errors) == (code, "")
    wait_until(lambda: not any(is_running(process.pid) for process in processes))


def test_the_shipped_gradients_are_those_of_the_script(tmp_path: Path) -> None:
    output_of(EXAMPLES / "record_digits.py", tmp_path / "digits.npz")
    shipped, recorded = np.load(DIGITS), np.load(tmp_path / "digits.npz")
    assert set(shipped) == set(recorded)
    for name in shipped:  # another CPU may sum in another order, and 200 steps of training amplify that
        assert (shipped[name].shape, shipped[name].dtype) == (recorded[name].shape, recorded[name].dtype)
