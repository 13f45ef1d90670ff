"""``bngrad advise`` against a real server, with and without what it compares the server with."""

from __future__ import annotations

import json
import re
import subprocess
import sys

from tests.servers import run_bngrad
from tests.unit.cli.extras import SERVER_EXTRA, run_without

from bngrad_cli.embedded import EmbeddedServer

FEW = ("--model", "2x4x3x3*5,4x8x5x6", "--seconds", "0.01", "--timeout", "100")


def test_the_server_is_compared_with_pytorch_and_the_kernels_here(server: EmbeddedServer) -> None:
    command = [sys.executable, "-m", "bngrad_cli", "advise", server.target, *FEW, "--dtype", "bfloat16"]
    ended = subprocess.run([*command, "--data-format", "NHWC", "--json"], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    said = json.loads(ended.stdout)
    assert [(layer["shape"], layer["count"], layer["bytes"]) for layer in said["layers"]] == [
        ([2, 4, 3, 3], 5, 2 * 3 * 72),
        ([4, 8, 5, 6], 1, 2 * 3 * 960),
    ]
    for layer in said["layers"]:
        assert min(layer["milliseconds"], key=layer["milliseconds"].get) == layer["fastest"]
    for name in ("server", "local:", "PyTorch"):
        total = sum(layer["count"] * layer["milliseconds"][name] for layer in said["layers"])
        assert 0 < said["total_milliseconds"][name] == total
    assert said["not_measured"] == {}
    assert "PyTorch" in said["verdict"]


def test_numbers_of_small_layers_are_shown_in_a_narrow_terminal_too(server: EmbeddedServer) -> None:
    ended = run_bngrad("advise", server.target, *FEW, environment={"COLUMNS": "40"})
    assert (ended.returncode, ended.stderr) == (0, "")
    assert re.search(r"^A network needs [0-9.]*[1-9]", ended.stdout, re.MULTILINE)
    assert "…" not in ended.stdout


def test_a_column_that_cannot_be_measured_says_why(server: EmbeddedServer) -> None:
    ended = run_without("torch", *SERVER_EXTRA, "bngrad_server", arguments=("advise", *FEW, server.target))
    assert (ended.returncode, ended.stderr) == (0, "")
    lines = ended.stdout.splitlines()
    rows = [line.split() for line in lines if re.match(r" ?(\d+x|all)", line)]
    assert [(row[0], row[1], row[-3:]) for row in rows[:2]] == [
        ("2x4x3x3", "5", ["-", "-", "-"]),
        ("4x8x5x6", "1", ["-", "-", "-"]),
    ]
    needs = "to compute in this process needs Numba: pip install '.[local]' in a checkout of bngrad"
    assert f"local: was not measured: {needs}" in lines
    assert "PyTorch was not measured: it is not installed" in lines
    verdict = "there is nothing to compare the server with: install PyTorch, or '.[local]' in a checkout of bngrad"
    assert f"Verdict: {verdict}" in lines
    assert lines[-1] == ""  # no module of the server was imported
