"""What goes wrong with the stand-in for a GPU: a file in the folder ``EMULATED_INCIDENTS`` for each incident.

A file is named after what happens. It holds the part of a kernel's name at which that happens, and is removed then; one
whose content ends with ``always`` stays.
"""

from __future__ import annotations

import os
from pathlib import Path


def take(what: str, where: str = "") -> bool:
    """Whether an incident happens here and now."""
    folder = os.environ.get("EMULATED_INCIDENTS")
    if folder is None:
        return False
    path = Path(folder) / what
    try:
        part, _, always = path.read_text().partition(" ")
    except FileNotFoundError:
        return False
    if part not in where:
        return False
    if not always:
        path.unlink(missing_ok=True)
    return True


def tell(what: str) -> None:
    """Writes a line to stderr at once: print writes the line's end apart, and other lines may come between."""
    os.write(2, f"{what}\n".encode())


def number(what: str, otherwise: int) -> int:
    """The number in the incident's file, or another one without the file."""
    path = Path(os.environ.get("EMULATED_INCIDENTS", "/nonexistent")) / what
    return int(path.read_text()) if path.exists() else otherwise
