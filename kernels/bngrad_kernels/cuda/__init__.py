"""The CUDA back end."""

from __future__ import annotations

from bngrad_kernels.cuda.back_end import CudaBackEnd

__all__ = ["CudaBackEnd"]
