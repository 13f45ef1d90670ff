"""The folder of compiled kernels.

Its name contains a hash of all sources of the CPU kernels, and of the versions of what compiles them.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path


@functools.cache
def folder() -> Path:
    """The cache folder of these sources, which has a folder for each level of processors."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = base / "bngrad" / _fingerprint()
    return path if _is_writable(path) else _copy_of(path)


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
    digest = hashlib.sha256(repr([version(package) for package in ("numba", "llvmlite")]).encode())
    for source in sorted(Path(__file__).parent.parent.rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]
