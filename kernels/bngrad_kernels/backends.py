"""Finds devices and creates their backends."""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

from bngrad_kernels.backend import Backend


class Devices(NamedTuple):
    """Devices to compute on.

    Attributes:
        names: Device names for `create`, one for each worker.
        remark: A sentence on why some or all GPUs are not used; None if the devices were named or all are used.
    """

    names: list[str]
    remark: str | None


def devices(wanted: str = "auto") -> Devices:
    """Returns the devices that a setting stands for.

    Args:
        wanted: ``"auto"`` for every usable GPU, or the CPU if there is none; otherwise comma-separated device names.

    Raises:
        ValueError: A name is invalid, or a device is named twice.
    """
    if wanted != "auto":
        names = [name.strip() for name in wanted.split(",")]
        for name in names:
            _check(name)
        if len(set(names)) < len(names):
            raise ValueError(f"device must name each device once, not {wanted!r}")
        return Devices(names, None)
    if importlib.util.find_spec("cupy") is None:
        brings = "pip install '.[cuda12]' or '.[cuda13]' in a checkout of bngrad brings it"
        return Devices(["cpu"], f"CuPy is not installed: {brings}")
    from bngrad_kernels.cuda import probe  # noqa: PLC0415

    usable, reasons = probe.usable()
    return Devices(usable or ["cpu"], "; ".join(reasons) or None)


def create(
    device: str, *, threads: int | None = None, gpu_memory_nbytes: int | None = None, is_eager: bool = False
) -> Backend:
    """Creates the backend of a device.

    Args:
        device: ``"cpu"``, or ``"cuda:N"`` for the GPU with that number.
        threads: How many threads the CPU uses; None for one per core that this process may use.
        gpu_memory_nbytes: About how much memory of a GPU tensors may take; None for nine tenths of it.
        is_eager: Whether a CPU computes the first order in NumPy while a kernel is compiled, rather than waits for it.

    Raises:
        ValueError: The name is invalid.
        DeviceUnavailableError: The GPU is missing or too old, or software is missing; the message says which.
    """
    _check(device)
    if device == "cpu":
        from bngrad_kernels.cpu import CpuBackend  # noqa: PLC0415 - a server of GPUs does not need LLVM
        from bngrad_kernels.cpu.uncompiled.backend import EagerBackend  # noqa: PLC0415

        return EagerBackend(threads) if is_eager else CpuBackend(threads)
    from bngrad_kernels.cuda import CudaBackend  # noqa: PLC0415
    from bngrad_kernels.cuda.device import CupyDevice  # noqa: PLC0415

    return CudaBackend(CupyDevice(int(device.removeprefix("cuda:"))), most_nbytes=gpu_memory_nbytes)


def _check(name: str) -> None:
    kind, colon, number = name.partition(":")
    is_gpu = kind == "cuda" and colon and number.isascii() and number.isdigit()
    if name != "cpu" and not is_gpu:
        raise ValueError(f"device must be 'cpu' or 'cuda:N', N being a number, not {name!r}")
