"""Files that the system refuses, for tests that root may run too."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def denied(path: Path, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of the system that refuses one path, and does as before with all others."""

    def refuse(given: Any, *arguments: Any, **options: Any) -> Any:
        if not isinstance(given, int) and Path(given) == path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(given))
        return function(given, *arguments, **options)

    return refuse
