"""``bngrad report``, with the strict stand-in for CuPy as a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.kernels.cuda.devices import library_file
from tests.kernels.cuda.strict_environment import environment

HASTY = """
import importlib
importlib.import_module("bngrad_cli.commands.report")._SMI_TIMEOUT_S = 0.5
from bngrad_cli.__main__ import main
main()
"""
"""A command line that waits for nvidia-smi for a short time."""


def report(folder: Path, *options: str, path: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", HASTY, "report", "--output", str(folder / "report.json"), *options]
    changed = os.environ | environment(library_file(), folder)
    return subprocess.run(command, capture_output=True, text=True, env=changed | {"PATH": path + os.environ["PATH"]})


@pytest.mark.parametrize("fails", [False, True])
def test_a_report_tells_whether_the_gpu_computes_right_and_no_secrets(tmp_path: Path, fails: bool) -> None:
    if fails:
        (tmp_path / "nothing is written").write_text("first_float16 always")
    done = report(tmp_path)
    assert done.returncode == fails, done.stderr
    text = (tmp_path / "report.json").read_text()
    found = json.loads(text)
    assert "numpy" in found["packages"]
    if fails:
        assert "failed its self-test: kernel first_float16_training_vectors" in found["failure"]
        assert found["failure"] in done.stderr
    else:
        assert "strict GPU" in found["description"]
        assert "passed its self-test" in found["self_test"]
        assert set(found["milliseconds"]) == {"a small problem", "25 MB of float32"}
    for secret in (os.uname().nodename, str(Path.home()), str(tmp_path)):
        assert secret not in text.replace(f'"{os.uname().release}"', "")


def test_a_report_that_cannot_be_written_is_refused_before_the_test(tmp_path: Path) -> None:
    done = report(tmp_path, "--output", str(tmp_path / "missing" / "report.json"))
    assert done.returncode == 2
    assert "No such file or directory" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_wrong_command_line_leaves_the_last_report_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("the last one")
    assert report(tmp_path, "and", "a", "word").returncode == 2
    assert report(tmp_path, "--device", "cpu").returncode == 2
    assert (tmp_path / "report.json").read_text() == "the last one"


def test_a_report_on_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    done = report(tmp_path, "--output", "/dev/full")
    assert done.returncode == 1
    assert done.stderr.endswith("\nError: cannot write /dev/full: No space left on device\n")


def test_a_report_may_go_to_the_standard_output(tmp_path: Path) -> None:
    done = report(tmp_path, "--output", "-")
    assert "passed its self-test" in json.loads(done.stdout)["self_test"]


@pytest.mark.parametrize(
    ("program", "line"),
    [
        (b"#!/bin/sh\nexec sleep 600\n", "no answer within 0.5 s"),
        (b"#!/bin/sh\nprintf 'GPU \\377'\n", "GPU \N{REPLACEMENT CHARACTER}"),
        (b"no program", "it cannot be run: Exec format error"),
    ],
    ids=["hangs", "no text", "no program"],
)
def test_a_report_is_written_whatever_nvidia_smi_does(tmp_path: Path, program: bytes, line: str) -> None:
    path = tmp_path / "nvidia-smi"
    path.write_bytes(program)
    path.chmod(0o755)
    done = report(tmp_path, path=f"{tmp_path}:")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "report.json").read_text())["nvidia_smi"] == [line]


def test_only_gpus_are_reported_on(tmp_path: Path) -> None:
    done = report(tmp_path, "--device", "cpu")
    assert done.returncode == 2
    assert "Invalid value for '--device': it should name a GPU, such as cuda:0, not 'cpu'" in done.stderr
    assert not list(tmp_path.glob("*.json"))
