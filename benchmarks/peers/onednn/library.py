"""The part of oneDNN's C API that batch norm needs, through ctypes."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Sequence
from ctypes import POINTER, Structure, Union, byref, c_char_p, c_int, c_int64, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any

from bngrad_kernels.problem import Array
from bngrad_kernels.spec import BFLOAT16, FLOAT16, FLOAT32, Spec

MAX_DIMENSIONS = 12
CPU = 1
DATA_TYPES = {FLOAT16: 1, BFLOAT16: 2, FLOAT32: 3}
STATUSES = (
    "success", "out of memory", "invalid arguments", "unimplemented", "last implementation reached", "runtime error",
    "not required", "invalid graph", "invalid graph op", "invalid shape", "invalid data type",
)  # fmt: skip

Dimensions = c_int64 * MAX_DIMENSIONS


class Version(Structure):
    """``dnnl_version_t``."""

    _fields_ = (
        ("major", c_int), ("minor", c_int), ("patch", c_int), ("hash", c_char_p),
        ("cpu_runtime", c_uint), ("gpu_runtime", c_uint),
    )  # fmt: skip


class ExecutionArgument(Structure):
    """``dnnl_exec_arg_t``."""

    _fields_ = (("arg", c_int), ("memory", c_void_p))


class _Layout(Union):
    _fields_ = (("strides", Dimensions), ("layout_id", c_size_t))


class LogicalTensor(Structure):
    """``dnnl_graph_logical_tensor_t``."""

    _fields_ = (
        ("id", c_size_t), ("ndims", c_int), ("dims", Dimensions), ("data_type", c_int), ("property", c_int),
        ("layout_type", c_int), ("layout", _Layout),
    )  # fmt: skip


class OneDnnError(Exception):
    """A call returned something else than success."""

    def __init__(self, function: str, status: int) -> None:
        self.status = STATUSES[status] if status < len(STATUSES) else str(status)
        super().__init__(f"{function}: {self.status}")


class Library:
    """The shared library with one CPU engine and one stream."""

    def __init__(self, path: Path) -> None:
        self._functions = ctypes.CDLL(str(path))
        self._functions.dnnl_version.restype = POINTER(Version)
        version = self._functions.dnnl_version().contents
        self.version = f"{version.major}.{version.minor}.{version.patch}"
        self.engine = self.create("dnnl_engine_create", CPU, c_size_t(0))
        self.stream = self.create("dnnl_stream_create", self.engine, 1)

    def call(self, function: str, *arguments: Any) -> None:
        """Calls a function that returns a status. Raises `OneDnnError`."""
        status = self._functions[function](*arguments)
        if status:
            raise OneDnnError(function, status)

    def create(self, function: str, *arguments: Any) -> c_void_p:
        """Calls a function whose first argument receives the object that it makes."""
        handle = c_void_p()
        self.call(function, byref(handle), *arguments)
        return handle


@functools.cache
def library() -> Library:
    """The library that the wheel ``onednn-cpu-gomp`` or ``onednn`` put into this environment."""
    return Library(Path(os.environ.get("BNGRAD_TEST_LIBDNNL", Path(sys.prefix, "lib", "libdnnl.so.3"))))


def dimensions(values: Sequence[int]) -> Any:
    return Dimensions(*values)


def channels_second(spec: Spec, values: Sequence[int]) -> list[int]:
    """Shape or strides in oneDNN's order of dimensions, which is (N, C, ...) whatever the memory looks like."""
    reordered = list(values)
    reordered.insert(1, reordered.pop(spec.channel_axis))
    return reordered


def element_strides(array: Array) -> list[int]:
    return [stride // array.itemsize for stride in array.strides]
