"""The folders of compiled kernels.

The name of the user's is a hash of all sources of the CPU kernels, and of the versions of what compiles them. That of a
wheel's is a hash of the sources alone: they are compiled already.
"""

from __future__ import annotations

import functools
import hashlib
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path

from bngrad_kernels import compiled_code


def home() -> Path:
    """The user's cache folder of these sources; perhaps it is not there, or cannot be written."""
    return compiled_code.cache_folder() / _fingerprint()


def shipped() -> Path:
    """The folder of the kernels that the wheel of these sources has brought along, if it has."""
    return Path(__file__).parents[2] / "compiled" / sources()


def folder() -> Path:
    """The cache folder of these sources, which has a folder for each level of processors; made again if it has gone."""
    path = home()
    return path if compiled_code.is_writable(path) else _copy_of(path)


def _copy_of(path: Path) -> Path:
    """Returns a private temporary copy of a read-only cache folder, such as that of a container image."""
    parent = compiled_code.private_folder()
    copy = parent / path.name
    if not copy.exists():
        draft = Path(tempfile.mkdtemp(dir=parent))
        try:
            _copy_kernels(path, draft)
            draft.rename(copy)
        except OSError:
            shutil.rmtree(draft)
            if not copy.exists():  # no other process was faster
                raise
    return copy


def _copy_kernels(source: Path, target: Path) -> None:
    for file in source.glob("*/*.o"):
        code = compiled_code.read(file)
        if code is not None:
            (target / file.parent.name).mkdir(exist_ok=True)
            compiled_code.write(target / file.parent.name / file.name, code)


@functools.cache
def _fingerprint() -> str:
    return _name_of(*(version(package).encode() for package in ("numba", "llvmlite")), sources().encode())


@functools.cache
def sources() -> str:
    """A name for all sources of the CPU kernels."""
    return _name_of(*(source.read_bytes() for source in sorted(Path(__file__).parent.parent.rglob("*.py"))))


def _name_of(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:16]
