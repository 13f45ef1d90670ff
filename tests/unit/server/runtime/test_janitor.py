"""The janitor removes what a server leaves behind, and nothing else."""

from __future__ import annotations

import os
import socket
from pathlib import Path

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
