"""The folder in which Numba caches compiled kernels.

Numba's disk cache notices changes in a function's own module, but not in the modules that the function calls. So the
folder's name contains a hash of all sources of this package and of the processor that they are compiled for.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba
from numba.core import config


def compiled(*signatures: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """``numba.njit`` with the disk cache in `folder`."""

    def decorate(function: Callable[..., Any]) -> Any:
        before = config.CACHE_DIR
        config.CACHE_DIR = str(folder())
        try:
            return numba.njit(*signatures, cache=True, **options)(function)
        finally:
            config.CACHE_DIR = before

    return decorate


internal = numba.njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""Decorates functions that only compiled functions call: leaves out the entry points for Python and C."""


@functools.cache
def folder() -> Path:
    """The cache folder of these sources and this processor; ``NUMBA_CACHE_DIR`` takes precedence."""
    if config.CACHE_DIR:
        return Path(config.CACHE_DIR)
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = base / "bngrad" / _fingerprint()
    return path if _is_writable(path) else _copy_of(path)


@contextmanager
def filling() -> Iterator[None]:
    """Lets one process fill the cache while others wait; once it is full, they load from it without waiting.

    If the process that holds the lock dies, the next one continues.
    """
    full = folder() / "full"
    if not full.exists():
        with (folder() / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not full.exists():  # no other process has filled it in the meantime
                yield
                full.touch()
                return
    yield


def _is_writable(path: Path) -> bool:
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return True
    except OSError:
        return False


def _copy_of(path: Path) -> Path:
    """Returns a private temporary copy of a read-only cache folder, such as that of a container image."""
    parent = Path(tempfile.gettempdir()) / f"bngrad-{os.getuid()}"
    parent.mkdir(mode=0o700, exist_ok=True)
    if parent.stat().st_uid != os.getuid():  # its contents are executed
        raise PermissionError(f"{parent}, for compiled kernels, belongs to another user; set XDG_CACHE_HOME")
    copy = parent / path.name
    if not copy.exists():
        draft = Path(tempfile.mkdtemp(dir=parent))
        if path.exists():
            shutil.copytree(path, draft, dirs_exist_ok=True)
        try:
            draft.rename(copy)
        except OSError:  # another process was faster
            shutil.rmtree(draft)
    return copy


def _fingerprint() -> str:
    cpu = llvmlite.binding.get_host_cpu_name(), llvmlite.binding.get_host_cpu_features().flatten()
    digest = hashlib.sha256(repr((numba.__version__, cpu)).encode())
    for source in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]
