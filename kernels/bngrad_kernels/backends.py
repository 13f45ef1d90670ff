"""The back ends by the name of their device."""

from __future__ import annotations

from bngrad_kernels.problem import BackEnd


def create(device: str) -> BackEnd:
    """The back end for a device.

    Args:
        device: ``"cpu"``.

    Raises:
        ValueError: There is no such device.
    """
    if device == "cpu":
        from bngrad_kernels.cpu import CpuBackEnd  # noqa: PLC0415 - Numba takes a second to import

        return CpuBackEnd()
    raise ValueError(f"device must be 'cpu', not {device!r}")
