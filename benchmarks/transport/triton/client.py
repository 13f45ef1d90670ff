"""Calls by Triton's own client: tensors in the messages, or in system shared memory that the client has registered."""

from __future__ import annotations

import contextlib
import math
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from benchmarks.transport import Call, Gradients, Prepare
from benchmarks.transport.triton import INPUTS, MODEL, OUTPUTS
from tritonclient.utils import shared_memory

from bngrad_kernels.problem import Array, Problem
from bngrad_kernels.spec import FLOAT32


@contextlib.contextmanager
def connect(target: str) -> Iterator[Prepare]:
    """Sends the tensors in gRPC messages."""

    @contextlib.contextmanager
    def prepare(problem: Problem) -> Iterator[Call]:
        tensors = _inputs(problem)
        outputs = [triton.InferRequestedOutput(name) for name in OUTPUTS]
        with triton.InferenceServerClient(target) as client:

            def call() -> Gradients:
                inputs = [_input(name, tensor) for name, tensor in tensors.items()]
                for each, tensor in zip(inputs, tensors.values(), strict=True):
                    each.set_data_from_numpy(tensor)
                answer = client.infer(MODEL, inputs, outputs=outputs)
                return Gradients(*map(answer.as_numpy, OUTPUTS))

            yield call

    yield prepare


@contextlib.contextmanager
def connect_shared(target: str) -> Iterator[Prepare]:
    """Places inputs and outputs in shared memory once; a call names them."""

    @contextlib.contextmanager
    def prepare(problem: Problem) -> Iterator[Call]:
        tensors = _inputs(problem)
        with contextlib.ExitStack() as stack:
            client = stack.enter_context(triton.InferenceServerClient(target))
            inputs = [_input(name, tensor) for name, tensor in tensors.items()]
            for each, tensor in zip(inputs, tensors.values(), strict=True):
                name, region = stack.enter_context(_region(client, tensor.nbytes))
                shared_memory.set_shared_memory_region(region, [tensor])
                each.set_shared_memory(name, tensor.nbytes)
            shapes = dict(zip(OUTPUTS, (problem.spec.shape, *2 * [(problem.spec.channels,)]), strict=True))
            outputs, arrays = [], []
            for output, shape in shapes.items():
                nbytes = math.prod(shape) * FLOAT32.itemsize
                name, region = stack.enter_context(_region(client, nbytes))
                outputs.append(triton.InferRequestedOutput(output))
                outputs[-1].set_shared_memory(name, nbytes)
                arrays.append(shared_memory.get_contents_as_numpy(region, np.float32, shape))

            def call() -> Gradients:
                client.infer(MODEL, inputs, outputs=outputs)
                return Gradients(*arrays)

            yield call

    yield prepare


def _inputs(problem: Problem) -> dict[str, Array]:
    return {name: getattr(problem, name) for name in INPUTS}


def _input(name: str, tensor: Array) -> Any:
    return triton.InferInput(name, list(tensor.shape), "FP32")


@contextlib.contextmanager
def _region(client: Any, nbytes: int) -> Iterator[tuple[str, Any]]:
    """Yields the name and the region of shared memory that client and server have mapped."""
    name = f"bngrad-benchmark-{uuid.uuid4()}"
    region = shared_memory.create_shared_memory_region(name, f"/{name}", nbytes)
    try:
        client.register_system_shared_memory(name, f"/{name}", nbytes)
        yield name, region
        client.unregister_system_shared_memory(name)
    finally:
        shared_memory.destroy_shared_memory_region(region)
