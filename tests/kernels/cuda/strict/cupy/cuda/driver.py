"""The driver's own error."""

from __future__ import annotations


class CUDADriverError(RuntimeError):
    """An error of the driver's interface."""
