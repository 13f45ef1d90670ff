"""How NumPy rounds: a program may have made a thread flush subnormal numbers to zero, by which bits would differ."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator

_libc = ctypes.CDLL(None)
_FE_DFL_ENV = ctypes.c_void_p(-1)
"""The default mode, as glibc and musl define it."""
_ENV_NBYTES = 64
"""More than C's ``fenv_t`` has."""


@contextlib.contextmanager
def default() -> Iterator[None]:
    """Rounds to nearest and keeps subnormal numbers meanwhile, in the calling thread."""
    if sys.platform != "linux":
        yield
        return
    before = ctypes.create_string_buffer(_ENV_NBYTES)
    _libc.fegetenv(before)
    _libc.fesetenv(_FE_DFL_ENV)
    try:
        yield
    finally:
        _libc.fesetenv(before)
