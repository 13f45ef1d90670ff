"""Where Numba keeps what it compiled.

Numba's disk cache notices changes of the module that a function stands in, not of the modules that it calls. So the
folder is named by a hash of every source of this package, and of the processor, for which alone it can be full.
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
"""Decorates what only compiled functions call, without the ways in for others."""


@functools.cache
def folder() -> Path:
    """The cache folder of these very sources and this processor; the user's ``NUMBA_CACHE_DIR`` wins."""
    if config.CACHE_DIR:
        return Path(config.CACHE_DIR)
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = base / "bngrad" / _fingerprint()
    return path if _is_writable(path) else _copy_of(path)


@contextmanager
def filling() -> Iterator[None]:
    """Has one process at a time fill the cache: the others load what it has compiled. A full one keeps nobody waiting.

    The lock is the process's: should it die, the next one goes on.
    """
    full = folder() / "full"
    if full.exists():
        yield
        return
    with (folder() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    full.touch()


def _is_writable(path: Path) -> bool:
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return True
    except OSError:
        return False


def _copy_of(path: Path) -> Path:
    """A folder among the temporary files, with what a container's image may have in the one that cannot be written."""
    parent = Path(tempfile.gettempdir()) / f"bngrad-{os.getuid()}"
    parent.mkdir(mode=0o700, exist_ok=True)
    if parent.stat().st_uid != os.getuid():  # what lies in there is run
        raise PermissionError(f"{parent}, for compiled kernels, belongs to another user; set XDG_CACHE_HOME")
    copy = parent / path.name
    if not copy.exists():
        draft = Path(tempfile.mkdtemp(dir=parent))
        if path.exists():
            shutil.copytree(path, draft, dirs_exist_ok=True)
        try:
            draft.rename(copy)
        except OSError:  # another worker was faster
            shutil.rmtree(draft)
    return copy


def _fingerprint() -> str:
    cpu = llvmlite.binding.get_host_cpu_name(), llvmlite.binding.get_host_cpu_features().flatten()
    digest = hashlib.sha256(repr((numba.__version__, cpu)).encode())
    for source in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]
