"""The server of a replica as a child process, which needs no Ray."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tests.clock import Clock
from tests.servers import is_running, wait_until

import bngrad

_OPTIONS = ("--workers", "1", "--device", "cpu")


def load() -> ModuleType:
    """Loads the module without its package, which imports Ray."""
    path = Path(bngrad.__file__).parent / "ray" / "_process.py"
    spec = importlib.util.spec_from_file_location("process_without_ray", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_server_imports_nothing_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in sys.stdlib_module_names:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name} of the current folder')")
    monkeypatch.chdir(tmp_path)
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(os.path.isabs, folders)))
    process = load().ServerProcess("127.0.0.1", _OPTIONS)
    try:
        process.wait(60)
        with bngrad.Client(process.target) as client:
            assert client.server_info().version == bngrad.__version__
    finally:
        process.stop()


def test_a_frozen_server_is_killed_once_and_started_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module, clock = load(), Clock()
    monkeypatch.setattr(module, "time", clock)
    process = module.ServerProcess("127.0.0.1", _OPTIONS)
    try:
        process.wait(60)
        frozen, target = process.pid, process.target
        os.kill(frozen, signal.SIGSTOP)
        for seconds, has_answered in [(0, False), (29, False), (2, True), (0, False), (29, False)]:
            clock.now += seconds
            process.heard(has_answered=has_answered)
            assert is_running(frozen)
        clock.now += 2
        process.heard(has_answered=False)
        wait_until(lambda: process.pid != frozen)
        with bngrad.Client(target) as client:
            wait_until(lambda: _answers(client))
        assert not is_running(frozen)
        process.heard(has_answered=False)
        assert len([record for record in caplog.records if "is killed" in record.message]) == 1
    finally:
        process.stop()


def _answers(client: bngrad.Client) -> bool:
    try:
        return bool(client.server_info().devices)
    except bngrad.UnavailableError:
        return False


def test_the_server_ends_with_the_process_that_started_it() -> None:
    code = f"""
import sys
from tests.ray.test_process import load
process = load().ServerProcess("127.0.0.1", {_OPTIONS!r})
process.wait(60)
print(process.pid, flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        parent.send_signal(signal.SIGKILL)
    wait_until(lambda: not is_running(pid))
