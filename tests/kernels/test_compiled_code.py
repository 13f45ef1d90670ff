"""Files of machine code."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from bngrad_kernels import compiled_code


@pytest.mark.parametrize(
    "damage",
    [lambda data: b"", lambda data: data[: len(data) // 2], lambda data: bytes(len(data)), lambda data: data + b"\0"],
    ids=["empty", "half", "zeros", "longer"],
)
def test_a_damaged_kernel_is_not_used(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    file = tmp_path / "kernel.o"
    compiled_code.write(file, b"code")
    file.write_bytes(damage(file.read_bytes()))
    assert compiled_code.read(file) is None


def test_any_user_may_read_a_kernel_that_one_has_compiled(tmp_path: Path) -> None:
    compiled_code.write(tmp_path / "kernel.o", b"code")
    assert (tmp_path / "kernel.o").stat().st_mode & 0o777 == 0o644


def test_a_kernel_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "kernel.o").mkdir()
    with pytest.raises(IsADirectoryError):
        compiled_code.write(tmp_path / "kernel.o", b"code")
    assert [path.name for path in tmp_path.iterdir()] == ["kernel.o"]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as writing to a full disk does

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/kernel.o'"):
        compiled_code.write(tmp_path / "kernel.o", b"code")
