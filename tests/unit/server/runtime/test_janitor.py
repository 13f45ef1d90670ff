"""The janitor removes what a server leaves behind, and nothing else."""

from __future__ import annotations

import os
import signal
import socket
from functools import partial
from pathlib import Path

import pytest
from tests.servers import children_of, is_running, wait_until

from bngrad_server.runtime import leftovers
from bngrad_server.runtime.janitor import Janitor


def listen(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def test_what_is_left_behind_is_removed(tmp_path: Path) -> None:
    left, directory = tmp_path / "socket", tmp_path / "directory"
    listen(left)
    directory.mkdir()
    listen(directory / "calls")
    Janitor([left, directory]).close()
    assert list(tmp_path.iterdir()) == []


def test_a_socket_that_another_server_has_made_at_the_same_path_stays(tmp_path: Path) -> None:
    """The system gives a free inode number to the next file at once."""
    path = tmp_path / "socket"
    listen(path)
    os.utime(path, (0, 0))  # or the clock of the file system might not tell the two apart
    janitor = Janitor([path])
    path.unlink()
    listen(path)
    janitor.close()
    assert path.exists()


def janitors() -> list[int]:
    return [child.pid for child in children_of(os.getpid(), leftovers.__file__)]


def only_janitor() -> int:
    wait_until(lambda: len(janitors()) == 1)  # a process that has just begun may have no arguments yet
    return janitors()[0]


def are_others(killed: list[int]) -> bool:
    return bool(set(janitors()) - set(killed))


def test_a_janitor_that_is_killed_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "socket"
    listen(path)
    janitor = Janitor([path])
    killed: list[int] = []
    for _ in range(3):
        killed.append(only_janitor())
        os.kill(killed[-1], signal.SIGKILL)
        wait_until(partial(are_others, killed))
    assert "the janitor process ended with exit code -9 and is started again" in caplog.text
    assert path.exists()
    janitor.close()
    assert not path.exists()
    assert janitors() == []


def test_what_is_left_is_removed_although_the_janitor_was_killed_last(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    listen(path)
    janitor = Janitor([path])
    pid = only_janitor()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_running(pid))
    janitor.close()
    assert not path.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_stop_signals_for_a_group_of_processes_do_not_end_it(tmp_path: Path, number: signal.Signals) -> None:
    janitor = Janitor([])
    pid = only_janitor()
    wait_until(lambda: ignores(pid, number))
    os.kill(pid, number)
    assert janitors() == [pid]
    janitor.close()


def ignores(pid: int, number: signal.Signals) -> bool:
    (mask,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigIgn:"))
    return bool(int(mask.split()[1], 16) >> (number - 1) & 1)
