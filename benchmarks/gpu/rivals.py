"""The rivals on a GPU: bngrad's kernels, PyTorch's own, and cuDNN's through PyTorch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cupy
import numpy as np
import torch
from benchmarks.gpu.cases import Case, Tensors, tensors

from bngrad_kernels.cuda.chunks.layout import Launch
from bngrad_kernels.cuda.descriptors import DESCRIPTOR, schedule_tiles, template
from bngrad_kernels.cuda.device import CupyDevice
from bngrad_kernels.cuda.plan import THREADS
from bngrad_kernels.spec import Spec

_COUNTER_NBYTES, _ALIGNMENT = 4, 256


class Resident:
    """One launch of bngrad's kernel over tensors in device memory.

    The tables are written once. A launch counts work tiles and arrivals in memory that must be zero, and in a server
    arrives so with the tables; here each launch has a copy of its own, so that nothing but the kernel is timed.
    """

    def __init__(
        self, device: CupyDevice, spec: Spec, batch: Sequence[Mapping[str, torch.Tensor]], launches: int
    ) -> None:
        self._device = device
        made = template(spec, spec.channels, device.traits)
        table = schedule_tiles([made] * len(batch), range(len(batch)), device.traits.cache_nbytes)
        scratch = -(-(made.partials_nbytes + made.coefficients_nbytes) // _ALIGNMENT) * _ALIGNMENT
        each_counters = made.arrived_counters + made.groups
        counters = (1 + each_counters * len(batch)) * _COUNTER_NBYTES
        self._scratch = torch.empty(scratch * len(batch), dtype=torch.uint8, device="cuda")
        self._counters = torch.zeros(launches * counters, dtype=torch.uint8, device="cuda")
        self._work_tiles = torch.from_numpy(table.view(np.uint8).copy()).cuda()
        records = np.frombuffer(bytearray(made.descriptor * len(batch) * launches), DESCRIPTOR)
        records = records.reshape(launches, len(batch))
        for i, each in enumerate(batch):
            for name, tensor in each.items():
                records[name][:, i] = tensor.data_ptr()
            records["coefficients"][:, i] = self._scratch.data_ptr() + i * scratch
            records["partials"][:, i] = records["coefficients"][:, i] + made.coefficients_nbytes
            first = self._counters.data_ptr() + np.arange(launches, dtype=np.uint64) * counters + _COUNTER_NBYTES
            records["arrived"][:, i] = first + i * each_counters * _COUNTER_NBYTES
            records["ready"][:, i] = records["arrived"][:, i] + made.arrived_counters * _COUNTER_NBYTES
        self._descriptors = torch.from_numpy(records.view(np.uint8).reshape(-1).copy()).cuda()
        self._records_nbytes, self._counters_nbytes = records[0].nbytes, counters
        self._launch = Launch(made.kernel, self._work_tiles.data_ptr(), len(table), 0, made.resident_nbytes)
        self._kernel = device.kernel(made.kernel.symbol)
        self.kind: str = made.kernel.kind.value
        self._next = 0

    def __call__(self) -> None:
        number, self._next = self._next, self._next + 1
        arguments = (
            np.uint64(self._descriptors.data_ptr() + number * self._records_nbytes),
            np.uint64(self._launch.work_tiles),
            np.uint32(self._launch.tile_count),
            np.uint64(self._counters.data_ptr() + number * self._counters_nbytes),
        )
        blocks = min(self._launch.tile_count, self._device.blocks)
        stream = cupy.cuda.Stream.null  # PyTorch's default stream as well
        self._kernel((blocks,), (THREADS,), arguments, shared_mem=self._launch.shared_nbytes, stream=stream)


def pytorch(case: Case, made: Tensors) -> Callable[[], Any]:
    """PyTorch's own kernel."""
    rstd = torch.rsqrt(made.variance + case.spec.epsilon)
    backward = torch.ops.aten.native_batch_norm_backward

    def run() -> Any:
        return backward(
            made.y_backprop, made.x, made.scale, made.mean, made.variance, made.mean, rstd,
            case.is_training, case.spec.epsilon, [True, True, True],
        )  # fmt: skip

    return run


def pytorch_host_to_host(case: Case, count: int, rounds: int) -> list[float]:
    """Seconds of rounds of PyTorch from page-locked tensors and back, all copies and kernels on one stream."""
    made = tensors(case)
    rstd = torch.rsqrt(made.variance + case.spec.epsilon)
    host = [[each.cpu().pin_memory() for each in (made.y_backprop, made.x, made.x_backprop)] for _ in range(count)]
    backward = torch.ops.aten.native_batch_norm_backward
    seconds = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for y_backprop, x, x_backprop in host:
            result = backward(
                y_backprop.to("cuda", non_blocking=True), x.to("cuda", non_blocking=True), made.scale, made.mean,
                made.variance, made.mean, rstd, case.is_training, case.spec.epsilon, [True, True, True],
            )  # fmt: skip
            x_backprop.copy_(result[0], non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds


def cudnn(case: Case, made: Tensors) -> Callable[[], Any] | None:
    """cuDNN's kernel: it has none for inference, and needs the reserve of its own forward pass."""
    if not case.is_training:
        return None
    forward, backward = torch.ops.aten.cudnn_batch_norm, torch.ops.aten.cudnn_batch_norm_backward
    offset, running = torch.zeros_like(made.scale), (made.mean.clone(), made.variance.clone())
    try:
        _, mean, rstd, reserve = forward(made.x, made.scale, offset, *running, True, 0.1, case.spec.epsilon)

        def run() -> Any:
            return backward(
                made.x, made.y_backprop, made.scale, *running, mean, rstd, case.spec.epsilon, reserve
            )  # fmt: skip

        run()
    except RuntimeError as error:
        print(f"cuDNN does not do {case}: {str(error)[:80]}")
        return None
    return run
