"""Finds exceptions that only the garbage collector can free."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_exceptions_left() -> Iterator[None]:
    """Asserts that the block leaves no exception, with the frames of its traceback, in a reference cycle.

    What was there before is not looked at, since that takes long in a large process.
    """
    gc.freeze()
    gc.disable()
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = [repr(each) for each in gc.garbage if isinstance(each, Exception)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
        gc.unfreeze()
    assert not left
