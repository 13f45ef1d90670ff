"""oneDNN's primitive for the backward pass of batch norm."""

from __future__ import annotations

from ctypes import c_float, c_uint, c_void_p

import numpy as np
from benchmarks.peers import UnsupportedError
from benchmarks.peers.onednn.library import (
    DATA_TYPES,
    ExecutionArgument,
    OneDnnError,
    channels_second,
    dimensions,
    element_strides,
    library,
)

from bngrad_kernels.problem import Array, Problem
from bngrad_kernels.spec import FLOAT32, ReserveSpace2Kind, Spec

_FORWARD_TRAINING, _FORWARD_INFERENCE, _BACKWARD = 64, 96, 128
_USE_GLOBAL_STATS, _USE_SCALE, _USE_SHIFT = 1, 2, 4
_SRC, _MEAN, _VARIANCE, _SCALE, _SHIFT = 1, 49, 50, 51, 52
_DIFF_SRC, _DIFF_DST, _DIFF_SCALE, _DIFF_SHIFT = 129, 145, 255, 256


class PrimitiveKernel:
    """A primitive with its memory objects on the problem's own arrays."""

    def __init__(self, problem: Problem) -> None:
        spec = problem.spec
        self._problem = problem
        self._scale = np.ones(spec.channels, np.float32) if problem.scale is None else problem.scale
        self._library = library()
        flags = c_uint(_USE_SCALE | _USE_SHIFT | (0 if spec.is_training else _USE_GLOBAL_STATS))
        tensor = self._descriptor(spec, problem.x)
        vector = self._descriptor(spec, self._scale)
        create, engine, epsilon = self._library.create, self._library.engine, c_float(spec.epsilon)
        forward = create(
            "dnnl_batch_normalization_forward_primitive_desc_create",
            engine, _FORWARD_TRAINING if spec.is_training else _FORWARD_INFERENCE, tensor, tensor, epsilon, flags, None,
        )  # fmt: skip
        backward = create(
            "dnnl_batch_normalization_backward_primitive_desc_create",
            engine, _BACKWARD, tensor, tensor, tensor, epsilon, flags, forward, None,
        )  # fmt: skip
        self._primitive = create("dnnl_primitive_create", backward)
        arrays = {
            _SRC: (tensor, problem.x),
            _DIFF_DST: (tensor, problem.y_backprop),
            _DIFF_SRC: (tensor, problem.x_backprop),
            _MEAN: (vector, problem.reserve_space_1),
            _VARIANCE: (vector, problem.reserve_space_2),
            _SCALE: (vector, self._scale),
            _DIFF_SCALE: (vector, problem.scale_backprop),
            _DIFF_SHIFT: (vector, problem.offset_backprop),
        }
        self._arguments = (ExecutionArgument * len(arrays))()
        for argument, (index, (descriptor, array)) in zip(self._arguments, arrays.items(), strict=True):
            argument.arg = index
            argument.memory = create("dnnl_memory_create", descriptor, engine, c_void_p(array.ctypes.data)).value

    def _descriptor(self, spec: Spec, array: Array) -> c_void_p:
        shape, strides = list(array.shape), element_strides(array)
        if array.ndim > 1:
            shape, strides = channels_second(spec, shape), channels_second(spec, strides)
        return self._library.create(
            "dnnl_memory_desc_create_with_strides",
            array.ndim, dimensions(shape), DATA_TYPES[array.dtype], dimensions(strides),
        )  # fmt: skip

    def run(self) -> None:
        stream = self._library.stream
        self._library.call("dnnl_primitive_execute", self._primitive, stream, len(self._arguments), self._arguments)
        self._library.call("dnnl_stream_wait", stream)

    def gradients(self) -> tuple[Array, Array, Array]:
        problem = self._problem
        return problem.x_backprop, problem.scale_backprop, problem.offset_backprop


def prepare(problem: Problem) -> PrimitiveKernel:
    spec = problem.spec
    if spec.reserve_space_2_kind is not ReserveSpace2Kind.VARIANCE or spec.stats_dtype != FLOAT32:
        raise UnsupportedError("the primitive takes a variance in float32")
    try:
        return PrimitiveKernel(problem)
    except OneDnnError as error:
        raise UnsupportedError(str(error)) from error


def version() -> str:
    return library().version
