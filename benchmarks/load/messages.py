"""Requests as prepared messages, and checks of their answers.

Tensors from 64 KB on lie in shared memory, as with ``transport="auto"``; smaller ones travel in the message.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np
from benchmarks.load import mix
from benchmarks.load.answers import Expected, WrongAnswerError, check_quiet_answer
from benchmarks.load.mix import Item

from bngrad._shared_memory.pool import Pool
from bngrad_kernels.problem import Array
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb

_SHARED_FROM_NBYTES = 64 * 1024
_DTYPES = {"float32": pb.DATA_TYPE_FLOAT32, "bfloat16": pb.DATA_TYPE_BFLOAT16}


class Output:
    """Memory for x_backprop, and the request field with its location."""

    def __init__(self, pool: Pool, item: Item) -> None:
        self.array = pool.empty(item.spec.shape, item.spec.dtype)
        self.field = pb.FusedBatchNormGradV2Request(x_backprop_location=_location(pool, self.array)).SerializeToString()


class NoOutput:
    """No memory: the answer holds x_backprop."""

    field = b""


class Request:
    """One kind of request: its message, and memory for its answers.

    Attributes:
        message: The request without the location of x_backprop.
        resting: Quarantined memory, with the time from which it is free.
    """

    def __init__(self, pool: Pool, item: Item, seed: int) -> None:
        self.item = item
        self._pool = pool
        self._problem = problem = mix.problem(item, seed)
        self._is_shared = item.spec.tensor_nbytes >= _SHARED_FROM_NBYTES
        self._inputs = [
            self._placed(array) for array in (problem.y_backprop, problem.x)
        ]  # Kept alive, since messages refer to them.
        y_backprop, x = (self._tensor(array) for array in self._inputs)
        self.message = pb.FusedBatchNormGradV2Request(
            y_backprop=y_backprop,
            x=x,
            scale=self._tensor(problem.scale),
            reserve_space_1=self._tensor(problem.reserve_space_1),
            reserve_space_2=self._tensor(problem.reserve_space_2),
            epsilon=item.spec.epsilon,
            data_format=item.data_format,
        ).SerializeToString()
        self.free: list[Output | NoOutput] = []
        self.resting: deque[tuple[float, Output | NoOutput]] = deque()
        self._last: tuple[Output | NoOutput, bytes] | None = None
        self._answer: bytes | None = None
        self._x_backprop: Expected | None = None

    def output(self, now: float) -> Output | NoOutput:
        while self.resting and self.resting[0][0] <= now:
            self.free.append(self.resting.popleft()[1])
        if self.free:
            return self.free.pop()
        return Output(self._pool, self.item) if self._is_shared else NoOutput()

    def is_right(self, result: Output | NoOutput, answer: bytes) -> bool:
        if self._answer is None:
            self._last = result, answer
            return True
        right = answer.endswith(self._answer)
        if self._x_backprop is not None and isinstance(result, Output):
            right = self._x_backprop.is_in(result.array) and right
        return right

    def learn(self) -> None:
        """Keeps the last answer as the expected one."""
        assert self._last is not None
        result, answer = self._last
        message = pb.FusedBatchNormGradV2Response.FromString(answer)
        spec = self.item.spec
        x_backprop = np.frombuffer(message.x_backprop.data, spec.dtype)
        if isinstance(result, Output):
            x_backprop = result.array
            self._x_backprop = Expected(x_backprop)
        elif x_backprop.size != math.prod(spec.shape):
            raise WrongAnswerError(f"{self.item}: x_backprop has {x_backprop.size} elements")
        sums = (np.frombuffer(tensor.data, np.float32) for tensor in (message.scale_backprop, message.offset_backprop))
        check_quiet_answer(str(self.item), self._problem, (x_backprop.reshape(spec.shape), *sums))  # type: ignore[arg-type]
        # The answer begins with the location of x_backprop, which varies.
        start = pb.FusedBatchNormGradV2Response(x_backprop=message.x_backprop).SerializeToString()
        self._answer = answer.removeprefix(start) if self._is_shared else answer

    def _placed(self, array: Array) -> Array:
        if not self._is_shared:
            return array
        placed = self._pool.empty(array.shape, array.dtype)
        np.copyto(placed, array)
        return placed

    def _tensor(self, array: Array | None) -> pb.Tensor:
        assert array is not None
        location = _location(self._pool, array)
        return pb.Tensor(
            dtype=_DTYPES[array.dtype.name],
            shape=array.shape,
            data=b"" if location is not None else array.tobytes(),
            location=location,
        )


def _location(pool: Pool, array: Array) -> pb.Location | None:
    located = pool.locate(array)
    if located is None:
        return None
    key, offset = located.place
    return pb.Location(region_key=key, offset=offset)
