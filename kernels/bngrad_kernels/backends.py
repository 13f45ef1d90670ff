"""The back ends by the name of their device."""

from __future__ import annotations

from bngrad_kernels.problem import BackEnd


def create(device: str, *, threads: int | None = None) -> BackEnd:
    """The back end for a device.

    Args:
        device: ``"cpu"``.
        threads: How many threads a CPU back end uses; every core that this process may use where None.

    Raises:
        ValueError: There is no such device.
    """
    if device == "cpu":
        from bngrad_kernels.cpu import CpuBackEnd  # noqa: PLC0415 - Numba takes a second to import

        return CpuBackEnd(threads)
    raise ValueError(f"device must be 'cpu', not {device!r}")
