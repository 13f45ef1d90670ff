"""Files of machine code, which is executed: they appear as a whole, and damaged ones are not used."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

_MODE = 0o644
"""A container may run as another user than the one that has compiled the code."""
_DIGEST_NBYTES = hashlib.sha256().digest_size


def cache_folder() -> Path:
    """Returns the folder of bngrad in the user's cache; one that cannot be made for a user without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bngrad"
    except RuntimeError:
        return Path(os.devnull) / "bngrad"


def write(path: Path, code: bytes) -> None:
    """Writes code, and its digest after it, on the disk before the file has its name."""
    descriptor, draft = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(code + hashlib.sha256(code).digest())
            file.flush()
            os.fchmod(descriptor, _MODE)
            os.fsync(descriptor)
        Path(draft).replace(path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise


def read(path: Path) -> bytes | None:
    """Returns the code of a file; None if there is none, or it cannot be read or is damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    code, digest = data[:-_DIGEST_NBYTES], data[-_DIGEST_NBYTES:]
    return code if hashlib.sha256(code).digest() == digest else None
