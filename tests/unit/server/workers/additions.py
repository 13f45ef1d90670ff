"""A worker that adds, in a thread rather than a process, and requests for it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from bngrad_kernels.problem import GradGradProblem
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_server.engine import Engine
from bngrad_server.errors import WorkerDiedError
from bngrad_server.memory.layout import ARENA
from bngrad_server.scheduling.job import Part
from bngrad_server.workers.ipc import pack_task, unpack_problem
from bngrad_wire.mapped_file import MappedFile

TIMEOUT_S = 20.0
SHAPE, CHANNELS = (2, 5, 7, 3), 3
NBYTES = 2 * 5 * 7 * 3 * 4


class Adder:
    """Writes sums of tensors and of statistics: enough to see that each is in its place."""

    def __init__(self, engine: Engine) -> None:
        self.may_run = threading.Event()
        self.may_run.set()
        self.batches: list[int] = []
        self._engine = engine
        self._has_died = False
        self._near, self._far = socket.socketpair()
        self.slots = 1

    def begin(self, parts: Sequence[Part]) -> Adder:
        self.batches.append(len(parts))
        threading.Thread(target=self._compute, args=(parts,)).start()
        return self

    def fileno(self) -> int:
        return self._near.fileno()

    def finish(self) -> None:
        if not self._near.recv(1):
            raise WorkerDiedError("died")

    def has_copy(self, number: int) -> bool:
        return False

    def kill(self) -> None:
        self.die()

    def die(self) -> None:
        """Closes its socket, whatever it computes."""
        self._has_died = True
        with suppress(OSError):
            self._far.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._near.close()
        self._far.close()

    def _compute(self, parts: Sequence[Part]) -> None:
        assert self.may_run.wait(TIMEOUT_S)
        if self._has_died:
            return
        for job, channels in parts:
            memories = {ARENA: self._engine.arena.view}
            for region in self._engine.regions:
                memories[region.number] = MappedFile(region.fd, region.nbytes).view
            problem = unpack_problem(pack_task(job.task, 0, channels), {0: job.spec}, memories)
            if isinstance(problem, GradGradProblem):
                problem.grad_y_backprop[...] = problem.grad_x_backprop + problem.y_backprop
                problem.grad_x[...] = problem.grad_x_backprop - problem.x
                problem.grad_scale[...] = sum(getattr(problem, name) for name in problem.small_inputs)
                continue
            problem.x_backprop[...] = problem.x + problem.y_backprop
            problem.scale_backprop[...] = problem.reserve_space_1 + (0 if problem.scale is None else problem.scale)
            problem.offset_backprop[...] = problem.reserve_space_2
        with suppress(OSError):  # it has died meanwhile
            self._far.send(b".")


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.001)


def tensor(array: np.ndarray[Any, Any]) -> pb.Tensor:
    return pb.Tensor(dtype=pb.DATA_TYPE_FLOAT32, shape=array.shape, data=array.tobytes())


def inputs(seed: int = 0, shape: tuple[int, ...] = SHAPE) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("y_backprop", "x"), shape)
    shapes |= dict.fromkeys(("scale", "reserve_space_1", "reserve_space_2"), shape[-1:])
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def request_of(arrays: dict[str, np.ndarray[Any, Any]], *, chunked: bool = False) -> pb.FusedBatchNormGradV3Request:
    tensors: dict[str, Any] = {name: tensor(array) for name, array in arrays.items()}
    message = pb.FusedBatchNormGradV3Request(**tensors)
    if chunked:
        message.y_backprop.ClearField("data")
        message.x.ClearField("data")
    return message


def check_answer(
    answer: pb.FusedBatchNormGradV3Response, x_backprop: bytes, arrays: dict[str, np.ndarray[Any, Any]]
) -> None:
    assert x_backprop == (arrays["x"] + arrays["y_backprop"]).tobytes()
    assert answer.scale_backprop.data == (arrays["reserve_space_1"] + arrays["scale"]).tobytes()
    assert answer.offset_backprop.data == arrays["reserve_space_2"].tobytes()
    assert tuple(answer.x_backprop.shape) == arrays["x"].shape
