"""The cache of compiled CPU kernels."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from numba.core import config

from bngrad_kernels.cpu import cache


@pytest.fixture(autouse=True)
def folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(config, "CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    cache.folder.cache_clear()
    yield
    cache.folder.cache_clear()


def test_they_are_kept_under_the_users_cache(tmp_path: Path) -> None:
    assert cache.folder().parent == tmp_path / "home" / "bngrad"


def image_brings_a_kernel(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts a kernel into the cache folder, makes that read-only, and returns it."""
    image = cache.folder()
    (image / "cpu").mkdir()
    (image / "cpu" / "kernel.nbc").write_bytes(b"code")
    monkeypatch.setattr(cache, "_is_writable", lambda path: False)
    cache.folder.cache_clear()
    return image


def test_a_read_only_cache_of_an_image_is_copied(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    image = image_brings_a_kernel(monkeypatch)
    for _ in range(2):  # as a second worker does
        cache.folder.cache_clear()
        assert cache.folder() == tmp_path / "tmp" / f"bngrad-{os.getuid()}" / image.name
    assert (cache.folder() / "cpu" / "kernel.nbc").read_bytes() == b"code"


def test_of_two_workers_that_copy_at_once_one_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    image = image_brings_a_kernel(monkeypatch)
    mkdtemp = tempfile.mkdtemp

    def begin_late(dir: Path) -> str:  # noqa: A002
        shutil.copytree(image, dir / image.name)  # the other one's
        return mkdtemp(dir=dir)

    monkeypatch.setattr(tempfile, "mkdtemp", begin_late)
    assert (cache.folder() / "cpu" / "kernel.nbc").read_bytes() == b"code"
    assert [path.name for path in cache.folder().parent.iterdir()] == [image.name]  # the draft is gone


def test_one_process_fills_the_cache_while_the_others_wait_and_a_full_one_is_not_locked() -> None:
    found_full: list[bool] = []

    def fill() -> None:
        with cache.filling():
            found_full.append((cache.folder() / "full").exists())
            time.sleep(0.05)

    with ThreadPoolExecutor(4) as threads:
        for future in [threads.submit(fill) for _ in range(4)]:
            future.result()
    assert found_full == [False, True, True, True]
    with cache.filling(), ThreadPoolExecutor(1) as threads:
        threads.submit(cache.filling().__enter__).result(20)


def test_a_cache_that_could_not_be_filled_is_not_full() -> None:
    def fail() -> None:
        with cache.filling():
            raise MemoryError

    with pytest.raises(MemoryError):
        fail()
    with cache.filling():
        assert not (cache.folder() / "full").exists()
    assert (cache.folder() / "full").exists()


def test_a_folder_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tmp" / "bngrad-4711").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")  # where no folder can be made
    with pytest.raises(PermissionError, match="bngrad-4711, for compiled kernels, belongs to another user"):
        cache.folder()
