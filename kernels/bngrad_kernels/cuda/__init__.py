"""The CUDA backend."""

from __future__ import annotations

from bngrad_kernels.cuda.backend import CudaBackend

__all__ = ["CudaBackend"]
