"""The CPU backend."""

from __future__ import annotations

from bngrad_kernels.cpu.backend import CpuBackend

__all__ = ["CpuBackend"]
