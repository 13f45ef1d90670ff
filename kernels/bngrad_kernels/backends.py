"""The back ends by the name of their device."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Sequence
from typing import NamedTuple

from bngrad_kernels.problem import AnyProblem, BackEnd, GradGradProblem, Problem


class Devices(NamedTuple):
    """Devices to compute on.

    Attributes:
        names: One for each worker, what `create` takes.
        remark: A sentence on why some or all GPUs are not among them, where nobody named the devices.
    """

    names: list[str]
    remark: str | None


def devices(wanted: str = "auto") -> Devices:
    """The devices that a name stands for.

    Args:
        wanted: ``"auto"`` for every usable GPU, or the CPU where there is none; or names of devices, with commas.

    Raises:
        ValueError: There is no such name, or a device is named twice.
    """
    if wanted != "auto":
        names = [name.strip() for name in wanted.split(",")]
        for name in names:
            _check(name)
        if len(set(names)) < len(names):
            raise ValueError(f"device must name each device once, not {wanted!r}")
        return Devices(names, None)
    if importlib.util.find_spec("cupy") is None:
        return Devices(["cpu"], "CuPy is not installed: pip install 'bngrad[cuda12]' or 'bngrad[cuda13]' brings it")
    from bngrad_kernels.cuda import probe  # noqa: PLC0415

    usable, reasons = probe.usable()
    return Devices(usable or ["cpu"], "; ".join(reasons) or None)


def create(device: str, *, threads: int | None = None) -> BackEnd:
    """The back end for a device.

    Args:
        device: ``"cpu"``, or ``"cuda:N"`` for the GPU of that number, beside which the CPU computes the second order.
        threads: How many threads the CPU uses; every core that this process may use where None.

    Raises:
        ValueError: There is no such name.
        DeviceUnavailableError: The GPU is not there or too old, or software is missing; says so in one sentence.
    """
    _check(device)
    if device == "cpu":
        from bngrad_kernels.cpu import CpuBackEnd  # noqa: PLC0415 - Numba takes a second to import

        return CpuBackEnd(threads)
    from bngrad_kernels.cuda import CudaBackEnd  # noqa: PLC0415
    from bngrad_kernels.cuda.device import CupyDevice  # noqa: PLC0415

    return _WithCpu(CudaBackEnd(CupyDevice(int(device.removeprefix("cuda:")))), threads)


class _WithCpu:
    """A GPU, and the CPU for what GPUs do not compute yet: the second order."""

    def __init__(self, gpu: BackEnd, threads: int | None) -> None:
        self.description, self.memory_nbytes = gpu.description, gpu.memory_nbytes
        self.register, self.unregister = gpu.register, gpu.unregister
        self._gpu = gpu
        self._cpu = create("cpu", threads=threads)
        self._cpu_mutex = threading.Lock()  # one batch takes all of its threads

    @property
    def used_nbytes(self) -> int:
        return self._gpu.used_nbytes

    def warm_up(self) -> None:
        self._gpu.warm_up()
        self._cpu.warm_up()

    def run(self, problems: Sequence[AnyProblem]) -> None:
        second = [problem for problem in problems if isinstance(problem, GradGradProblem)]
        if second:
            with self._cpu_mutex:
                self._cpu.run(second)
        if len(second) < len(problems):
            self._gpu.run([problem for problem in problems if isinstance(problem, Problem)])


def _check(name: str) -> None:
    kind, colon, number = name.partition(":")
    is_gpu = kind == "cuda" and colon and number.isascii() and number.isdigit()
    if name != "cpu" and not is_gpu:
        raise ValueError(f"device must be 'cpu' or 'cuda:N', N being a number, not {name!r}")
