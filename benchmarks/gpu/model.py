"""``python -m benchmarks.gpu.model``: predicted time of the first order in training, on GPUs that are not at hand.

An event model of the kernels' queue. Blocks take the work tiles of the real schedule in its order. A tile costs a fixed
time, then that of its bytes, then a fixed time again; a block that applies begins to load its tile, then waits for the
one that finishes its group.
All blocks share the memory's rate, and none exceeds what its loads in flight allow. The second read of a group comes
from the second-level cache, at no cost for the memory, if `is_read_from_cache` says so, and so does a larger one's end.

It assumes that nothing is cached at the start, that a launch costs nothing, and the latencies below, which follow from
the machine code and from published measurements. Nothing of it comes from a GPU: a figure may be wrong by 40 %. The
figures serve to compare versions of the kernels and of their plan.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
from benchmarks.kernels.cases import DTYPES, LAYOUTS, RESNET50

from bngrad_kernels.cuda.descriptors import APPLY, GROUP, PHASE, TILE, Piece, Template, schedule_tiles, template
from bngrad_kernels.cuda.device import BLOCKS_PER_PROCESSOR
from bngrad_kernels.cuda.kernel_selection import STATIC_SHARED_NBYTES, KernelKind, Traits, is_read_from_cache, lookahead
from bngrad_kernels.problem import Problem
from bngrad_kernels.spec import Spec


class Costs(NamedTuple):
    """The fixed times of the kernels, in cycles.

    Attributes:
        setup: From a tile's start to its first load: the scheduler's turn, the indices, the channels' coefficients.
        reduce: From the last load of a tile to its published sums.
        finish: Of a group, beside loading its partial sums.
        at_once: How many partial sums a thread of the finish has on their way at a time.
        early_nbytes: How much of a tile a block loads before it waits for the tile's group to be finished.
    """

    setup: int = 1000
    reduce: int = 1500
    finish: int = 1500
    at_once: int = 8
    early_nbytes: int = 16 << 10


NOW = Costs()
BEFORE = Costs(setup=3100, at_once=1, early_nbytes=0)
"""With divisions in the indices, one load of the finish at a time, and no load before the wait."""
_IN_FLIGHT_NBYTES = 32 << 10
"""What a block's loads keep on their way: 256 threads, 4 steps, 2 tensors, 16 bytes."""


class Gpu(NamedTuple):
    """A GPU.

    Attributes:
        traits: The properties that the choice of kernels depends on.
        hz: Cycles per second.
        rate: Bytes per second that a copy moves, read and written: nine tenths of the data sheet's.
        memory_cycles: The latency of memory.
        cache_cycles: The latency of the second-level cache.
    """

    traits: Traits
    hz: float
    rate: float
    memory_cycles: int = 700
    cache_cycles: int = 300


_KIB, _MIB = 1 << 10, 1 << 20
GPUS = {
    "T4": Gpu(Traits(40, 64 * _KIB, 4 * _MIB), 1.59e9, 0.288e12),
    "L4": Gpu(Traits(58, 99 * _KIB, 48 * _MIB), 2.04e9, 0.27e12),
    "A10": Gpu(Traits(72, 99 * _KIB, 6 * _MIB), 1.70e9, 0.54e12),
    "A100": Gpu(Traits(108, 163 * _KIB, 40 * _MIB), 1.41e9, 1.4e12),
    "H100": Gpu(Traits(132, 227 * _KIB, 50 * _MIB), 1.76e9, 3.0e12),
    "H200": Gpu(Traits(132, 227 * _KIB, 50 * _MIB), 1.76e9, 4.3e12),
    "B200": Gpu(Traits(148, 227 * _KIB, 126 * _MIB), 1.85e9, 7.0e12),
}


class Layer(NamedTuple):
    """A batch-norm layer in training."""

    layout: str
    dtype: str
    chw: tuple[int, int, int]
    batch: int = 32

    @property
    def spec(self) -> Spec:
        """The specification of the computation."""
        channels, height, width = self.chw
        last = self.layout == "NHWC"
        shape = (self.batch, height, width, channels) if last else (self.batch, *self.chw)
        return Spec(DTYPES[self.dtype], shape, 3 if last else 1)


class Prediction(NamedTuple):
    """The kind of kernel, the time, and its ratio to that of three tensors' traffic."""

    kind: str
    seconds: float
    to_floor: float


def predict(gpu: Gpu, spec: Spec, costs: Costs = NOW) -> Prediction:
    """Predicts the time of one launch."""
    problem = Problem(spec, *[np.empty(0)] * 8)
    made = template(Piece(problem, 0, spec.channels), gpu.traits)
    model = _Model(gpu, made, costs)
    if made.kernel.kind is KernelKind.RESIDENT:
        kind, blocks = "resident", model.resident()
    else:
        is_cached = is_read_from_cache(made.group_nbytes, gpu.traits.cache_nbytes)
        kind, blocks = f"streamed, {'cache' if is_cached else 'memory'}", model.streamed(is_cached)
    seconds = model.run(blocks)
    return Prediction(kind, seconds, seconds * gpu.rate / (3 * spec.tensor_nbytes))


Wait: TypeAlias = "tuple[str, float, float]"
"""What a block waits for: ("time", seconds, 0), ("bytes", how many, most bytes per second), or ("group", number, 0)."""


class _Model:
    """The blocks of a launch, which share the memory's rate in proportion to what each could use alone."""

    def __init__(self, gpu: Gpu, made: Template, costs: Costs) -> None:
        self._gpu, self._made, self._costs = gpu, made, costs
        self._ready: set[int] = set()
        self._waiting: dict[int, list[Iterator[Wait]]] = {}

    def streamed(self, is_cached: bool) -> list[Iterator[Wait]]:
        """The blocks of the streamed kernel, which take the work tiles of the real schedule."""
        table = schedule_tiles([self._made], [0], self._gpu.traits.cache_nbytes)
        queue = iter(table[:, [PHASE, GROUP, TILE]].tolist())
        self._left = dict.fromkeys(range(self._made.groups), self._made.cut.tiles)
        count = min(len(table), BLOCKS_PER_PROCESSOR * self._gpu.traits.processors)
        return [self._streamed_block(queue, is_cached) for _ in range(count)]

    def resident(self) -> list[Iterator[Wait]]:
        """The blocks of the resident kernel, as many as the shared memory has room for."""
        each = self._made.resident_nbytes + STATIC_SHARED_NBYTES
        room = max(1, min(BLOCKS_PER_PROCESSOR, (self._gpu.traits.shared_nbytes + _KIB) // each))
        queue = iter(range(self._made.groups))
        return [self._resident_block(queue) for _ in range(min(self._made.groups, room * self._gpu.traits.processors))]

    def _streamed_block(self, queue: Iterator[list[int]], is_cached: bool) -> Iterator[Wait]:
        costs, hz = self._costs, self._gpu.hz
        nbytes = self._made.group_nbytes / self._made.cut.tiles  # of both inputs
        memory_rate = _IN_FLIGHT_NBYTES * hz / self._gpu.memory_cycles
        cache_rate = _IN_FLIGHT_NBYTES * hz / self._gpu.cache_cycles
        ahead = lookahead(self._made.group_nbytes, self._gpu.traits.cache_nbytes)
        for phase, group, tile in queue:
            if phase == APPLY:
                between = 2 * nbytes * (self._made.cut.tiles - 1 - tile) + ahead  # read since the tile was summed
                is_hit = is_cached or between <= self._gpu.traits.cache_nbytes / 2
                early = 0 if is_hit else min(costs.early_nbytes, nbytes)
                before_wait = costs.setup if costs.early_nbytes else 0
                yield "time", before_wait / hz, 0
                if early:
                    yield "bytes", early, memory_rate
                if group not in self._ready:
                    yield "group", group, 0
                yield "time", (self._gpu.cache_cycles + costs.setup - before_wait) / hz, 0
                if is_hit:
                    yield "bytes", nbytes / 2, cache_rate / 2
                else:
                    yield "bytes", nbytes * 1.5 - early, memory_rate * 1.5
                continue
            yield "time", (costs.setup + self._gpu.memory_cycles) / hz, 0
            yield "bytes", nbytes, memory_rate
            yield "time", costs.reduce / hz, 0
            self._left[group] -= 1
            if not self._left[group]:
                yield "time", self._finish_s(), 0
                self._ready.add(group)

    def _resident_block(self, queue: Iterator[int]) -> Iterator[Wait]:
        costs, hz = self._costs, self._gpu.hz
        rate = _IN_FLIGHT_NBYTES * hz / self._gpu.memory_cycles
        for _ in queue:
            yield "time", (costs.setup + self._gpu.memory_cycles) / hz, 0
            yield "bytes", self._made.group_nbytes, rate
            yield "time", self._made.cut.tiles * costs.reduce / hz + self._finish_s() + costs.setup / hz, 0
            yield "bytes", self._made.group_nbytes / 2, rate

    def _finish_s(self) -> float:
        """A thread adds up the partial sums of some tiles, several loads at a time."""
        rounds = math.ceil(self._made.cut.tiles / self._made.cut.parts / self._costs.at_once)
        return (self._costs.finish + rounds * (self._gpu.cache_cycles + 20 * self._costs.at_once)) / self._gpu.hz

    def run(self, blocks: list[Iterator[Wait]]) -> float:
        """The time until the last block has ended, in seconds."""
        numbers = itertools.count()  # heaps must not compare blocks
        timers: list[tuple[float, int, Iterator[Wait]]] = [(0.0, next(numbers), block) for block in blocks]
        moving: list[tuple[float, int, float, Iterator[Wait]]] = []
        now = progress = wanted = 0.0  # progress: seconds that a block would have moved at its own rate
        while timers or moving:
            share = min(1.0, self._gpu.rate / wanted) if moving else 1.0
            moved_at = now + (moving[0][0] - progress) / share if moving else math.inf
            ends_at = timers[0][0] if timers else math.inf
            progress += (min(moved_at, ends_at) - now) * share
            now = min(moved_at, ends_at)
            if moved_at <= ends_at:
                _, _, rate, block = heapq.heappop(moving)
                wanted -= rate
            else:
                _, _, block = heapq.heappop(timers)
            wait = next(block, None)
            for group in self._ready & self._waiting.keys():
                for waiting in self._waiting.pop(group):
                    heapq.heappush(timers, (now, next(numbers), waiting))
            if wait is None:
                continue
            kind, amount, rate = wait
            if kind == "time":
                heapq.heappush(timers, (now + amount, next(numbers), block))
            elif kind == "bytes":
                heapq.heappush(moving, (progress + amount / rate, next(numbers), rate, block))
                wanted += rate
            else:
                self._waiting.setdefault(int(amount), []).append(block)
        return now


def main() -> None:
    """Prints the table."""
    print("predicted time / that of three tensors' traffic, batch 32, training; in brackets before the last changes")
    print(f"{'':30}" + "".join(f"{name:>14}" for name in GPUS))
    for layout, dtype, chw in itertools.product(LAYOUTS, ("bfloat16", "float32"), RESNET50):
        spec = Layer(layout, dtype, chw).spec
        cells = [(predict(gpu, spec), predict(gpu, spec, BEFORE)) for gpu in GPUS.values()]
        name = f"{layout} {dtype} {'x'.join(map(str, chw))}"
        print(f"{name:30}" + "".join(f"{now.to_floor:7.2f} ({was.to_floor:.2f})" for now, was in cells), flush=True)


if __name__ == "__main__":
    main()
