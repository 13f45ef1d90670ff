"""The model that Triton's Python backend runs in a process of its own."""

from __future__ import annotations

import os
from typing import Any

import triton_python_backend_utils as triton
from benchmarks.transport.kernel import Kernel
from benchmarks.transport.triton import INPUTS, OUTPUTS, THREADS

from bngrad_kernels.problem import Problem
from bngrad_kernels.spec import FLOAT32, Spec


class TritonPythonModel:
    """The class that Triton looks for."""

    def initialize(self, args: dict[str, str]) -> None:
        self._kernel = Kernel(int(os.environ[THREADS]))

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        """Reads the inputs in the shared memory of server and model, where Tensor copies the outputs to."""
        inputs = [triton.get_input_tensor_by_name(request, name).as_numpy() for name in INPUTS]
        spec = Spec(FLOAT32, inputs[1].shape, 3)
        answer = self._kernel.run(Problem.allocate(spec, *inputs))
        outputs = [triton.Tensor(name, array) for name, array in zip(OUTPUTS, answer, strict=True)]
        return triton.InferenceResponse(outputs)
