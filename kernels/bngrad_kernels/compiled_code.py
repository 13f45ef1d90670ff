"""Files of machine code, which is executed: they appear as a whole, and damaged ones are not used."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from pathlib import Path

_MODE = 0o644
"""A container may run as another user than the one that has compiled the code."""
_DIGEST_NBYTES = hashlib.sha256().digest_size


def cache_folder() -> Path:
    """Returns the folder of bngrad in the user's cache; one that cannot be made for a user without a home."""
    home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        # A relative path is ignored, as XDG's specification asks.
        return (home if home.is_absolute() else Path.home() / ".cache") / "bngrad"
    except RuntimeError:
        return Path(os.devnull) / "bngrad"


def private_folder() -> Path:
    """Makes and returns a temporary folder of this user, for when the cache cannot be written.

    Raises:
        PermissionError: Another user can write to it.
    """
    folder = Path(tempfile.gettempdir()) / f"bngrad-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    is_private = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
    if not is_private:  # its contents are executed
        problem = "is not a folder that only this user can write to"
        raise PermissionError(f"{folder}, for compiled kernels, {problem}; set XDG_CACHE_HOME")
    return folder


def is_writable(folder: Path) -> bool:
    """Makes a folder, and returns whether files can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def write(path: Path, code: bytes) -> None:
    """Writes code, and its digest after it, on the disk before the file has its name."""
    descriptor, draft = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(sealed(code))
            file.flush()
            os.fchmod(descriptor, _MODE)
            os.fsync(descriptor)
        Path(draft).replace(path)
    except BaseException as error:
        Path(draft).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # on a full disk a file is written without being named
        raise


def read(path: Path) -> bytes | None:
    """Returns the code of a file; None if there is none, or it cannot be read or is damaged."""
    try:
        return unsealed(path.read_bytes())
    except OSError:
        return None


def sealed(code: bytes) -> bytes:
    """Returns code with its digest after it."""
    return code + hashlib.sha256(code).digest()


def unsealed(data: bytes) -> bytes | None:
    """Returns the code of what `sealed` has made; None if it is damaged, or something else."""
    code, digest = data[:-_DIGEST_NBYTES], data[-_DIGEST_NBYTES:]
    return code if hashlib.sha256(code).digest() == digest else None
