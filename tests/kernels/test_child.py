"""Modules that run as child processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bngrad_kernels.child import module_command

SCRIPT = "import sys; print(__name__, sys.argv[1:], sys.modules['__main__'].__file__ == __file__ == sys.argv[0])"


@pytest.fixture
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module on PYTHONPATH, and a current folder whose modules replace those of Python itself."""
    modules, current = tmp_path / "modules", tmp_path / "current"
    for folder in (modules, current):
        folder.mkdir()
    (modules / "printing.py").write_text(SCRIPT)
    for name in sys.stdlib_module_names:
        (current / f"{name}.py").write_text(f"raise SystemExit('{name} of the current folder')")
    monkeypatch.setenv("PYTHONPATH", str(modules))
    monkeypatch.chdir(current)


@pytest.mark.usefixtures("_module")
@pytest.mark.parametrize("is_safe", [False, True])
def test_a_module_runs_as_main_and_nothing_of_the_current_folder_does(
    monkeypatch: pytest.MonkeyPatch, is_safe: bool
) -> None:
    if is_safe:
        monkeypatch.setenv("PYTHONSAFEPATH", "1")
    ran = subprocess.run(module_command("printing", "a b", 1), capture_output=True, text=True)
    assert (ran.stdout, ran.stderr) == ("__main__ ['a b', '1'] True\n", "")


def test_a_module_of_ours_is_found_by_the_child_of_a_process_that_has_it_on_its_own_path_alone() -> None:
    command = module_command("bngrad_kernels.child", "printing")
    ran = subprocess.run([command[0], "-S", *command[1:]], capture_output=True, text=True, cwd="/")
    assert "No module named printing" in ran.stderr
