"""The CUDA back end."""

from __future__ import annotations

from bngrad_kernels.cuda.backend import CudaBackEnd

__all__ = ["CudaBackEnd"]
