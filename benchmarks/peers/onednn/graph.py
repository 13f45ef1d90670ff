"""oneDNN Graph's op ``BatchNormTrainingBackprop``, compiled as a separate partition."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_float, c_size_t, c_void_p, pointer
from typing import Any

from benchmarks.peers import UnsupportedError
from benchmarks.peers.onednn import primitive
from benchmarks.peers.onednn.library import (
    CPU,
    DATA_TYPES,
    LogicalTensor,
    OneDnnError,
    dimensions,
    element_strides,
    library,
)

from bngrad_kernels.problem import Array, Problem
from bngrad_kernels.spec import FLOAT16, ReserveSpace2Kind

_BATCH_NORM_BACKWARD = 5
_EPSILON, _DATA_FORMAT = 0x3, 0x83
_FUSION = 1


class GraphKernel:
    """A compiled partition with its tensors on the problem's own arrays."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._library = library()
        inputs = [problem.x, problem.y_backprop, problem.reserve_space_1, problem.reserve_space_2]
        if problem.scale is not None:
            inputs.append(problem.scale)
        outputs = [problem.x_backprop, problem.scale_backprop, problem.offset_backprop]
        input_headers = [self._logical_tensor(index, array) for index, array in enumerate(inputs)]
        output_headers = [self._logical_tensor(10 + index, array) for index, array in enumerate(outputs)]
        self._compiled = self._compile(input_headers, output_headers)
        self._inputs = self._tensors(input_headers, inputs)
        self._outputs = self._tensors(output_headers, outputs)

    def _logical_tensor(self, index: int, array: Array) -> LogicalTensor:
        header = LogicalTensor()
        self._library.call(
            "dnnl_graph_logical_tensor_init_with_strides",
            byref(header), c_size_t(index), DATA_TYPES[array.dtype], array.ndim,
            dimensions(array.shape), dimensions(element_strides(array)), 0,
        )  # fmt: skip
        return header

    def _compile(self, inputs: list[LogicalTensor], outputs: list[LogicalTensor]) -> c_void_p:
        call, create = self._library.call, self._library.create
        spec = self._problem.spec
        data_format = b"NCX" if spec.channel_axis == 1 and len(spec.shape) > 2 else b"NXC"
        op = create("dnnl_graph_op_create", c_size_t(0), _BATCH_NORM_BACKWARD, b"bngrad")
        for header in inputs:
            call("dnnl_graph_op_add_input", op, byref(header))
        for header in outputs:
            call("dnnl_graph_op_add_output", op, byref(header))
        call("dnnl_graph_op_set_attr_f32", op, _EPSILON, byref(c_float(spec.epsilon)), c_size_t(1))
        call("dnnl_graph_op_set_attr_str", op, _DATA_FORMAT, data_format, c_size_t(len(data_format)))
        graph = create("dnnl_graph_graph_create", CPU)
        call("dnnl_graph_add_op", graph, op)
        call("dnnl_graph_graph_finalize", graph)
        call("dnnl_graph_graph_filter", graph, _FUSION)
        partition = c_void_p()
        call("dnnl_graph_graph_get_partitions", graph, c_size_t(1), byref(partition))
        compiled = create("dnnl_graph_compiled_partition_create", partition)
        call(
            "dnnl_graph_partition_compile",
            partition, compiled, c_size_t(len(inputs)), _pointers(inputs), c_size_t(len(outputs)), _pointers(outputs),
            self._library.engine,
        )  # fmt: skip
        return compiled

    def _tensors(self, headers: list[LogicalTensor], arrays: list[Array]) -> ctypes.Array[c_void_p]:
        engine = self._library.engine
        tensors = [
            self._library.create("dnnl_graph_tensor_create", byref(header), engine, c_void_p(array.ctypes.data))
            for header, array in zip(headers, arrays, strict=True)
        ]
        return (c_void_p * len(tensors))(*tensors)

    def run(self) -> None:
        stream = self._library.stream
        self._library.call(
            "dnnl_graph_compiled_partition_execute",
            self._compiled, stream, c_size_t(len(self._inputs)), self._inputs, c_size_t(3), self._outputs,
        )  # fmt: skip
        self._library.call("dnnl_stream_wait", stream)

    def gradients(self) -> tuple[Array, Array, Array]:
        problem = self._problem
        return problem.x_backprop, problem.scale_backprop, problem.offset_backprop


def _pointers(headers: list[LogicalTensor]) -> Any:
    return (POINTER(LogicalTensor) * len(headers))(*(pointer(header) for header in headers))


def prepare(problem: Problem) -> GraphKernel:
    spec = problem.spec
    if spec.reserve_space_2_kind is not ReserveSpace2Kind.VARIANCE or not spec.is_training:
        raise UnsupportedError("the op has the training formula and takes a variance")
    if spec.dtype == FLOAT16:
        raise UnsupportedError("compiling float16 ends the process where the CPU has no float16 arithmetic")
    # Compiling what the primitive refuses ends the process too: bfloat16 on a CPU without AVX-512.
    primitive.prepare(problem)
    try:
        return GraphKernel(problem)
    except OneDnnError as error:
        raise UnsupportedError(str(error)) from error


def version() -> str:
    return library().version
