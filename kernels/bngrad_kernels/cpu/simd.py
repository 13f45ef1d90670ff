"""Vectors of 16 floats for Numba, with one lane structure on every CPU.

LLVM splits an explicit ``<16 x float>`` into the registers of the CPU, and without fast-math flags it may neither
reorder nor fuse operations; so the bits do not depend on the CPU. Memory is given by address, since payloads may be
read-only and unaligned; the type of a tag gives the element type, see `TAGS`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

from bngrad_kernels.cpu import llvm
from bngrad_kernels.cpu.plan import LANES
from bngrad_kernels.spec import BFLOAT16, FLOAT16, FLOAT32

TAGS = {FLOAT32: np.float32(0), FLOAT16: np.int16(0), BFLOAT16: np.uint16(0)}
"""A scalar for each element type. Numba specialises on the scalar's type, since it has no 16-bit floats on a CPU."""


class _VectorType(types.Type):  # type: ignore[misc]  # numba ships no types.
    """The Numba type of a vector register."""


F32x16 = _VectorType("F32x16")
F64x16 = _VectorType("F64x16")


@register_model(_VectorType)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, llvm.F32X16 if fe_type is F32x16 else llvm.F64X16)


@intrinsic
def load(typingctx: Any, tag: Any, address: Any, index: Any) -> Any:
    """The 16 elements from ``index`` on, widened."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element = llvm.MEMORY_TYPES[tag]
        pointer = llvm.pointer(builder, element, args[1], args[2])
        vector = builder.load(builder.bitcast(pointer, ir.VectorType(element, LANES).as_pointer()), align=1)
        return llvm.widen(builder, vector)

    return F32x16(tag, types.int64, types.int64), codegen


@intrinsic
def load_line(typingctx: Any, tag: Any, address: Any, index: Any) -> Any:
    """The 32 elements from ``index`` on, widened, as two vectors in the order of `in_line_order`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element = llvm.MEMORY_TYPES[tag]
        place = llvm.pointer(builder, element, args[1], args[2])
        return context.make_tuple(builder, signature.return_type, llvm.load_line(builder, place, element))

    return types.UniTuple(F32x16, 2)(tag, types.int64, types.int64), codegen


@intrinsic
def is_rearranged(typingctx: Any, tag: Any) -> Any:
    """Whether lines of this type have another order, see `in_line_order`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return llvm.I1(tag == types.uint16)

    return types.boolean(tag), codegen


@intrinsic
def in_line_order(typingctx: Any, tag: Any, low: Any, high: Any) -> Any:
    """32 lanes in the order in which the CPU widens a line of this type most easily: bfloat16's even ones, then odd."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors = args[1:] if tag != types.uint16 else llvm.deinterleave(builder, *args[1:])
        return context.make_tuple(builder, signature.return_type, vectors)

    return types.UniTuple(F32x16, 2)(tag, F32x16, F32x16), codegen


@intrinsic
def from_line_order(typingctx: Any, tag: Any, first: Any, second: Any) -> Any:
    """The reverse of `in_line_order`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors = args[1:] if tag != types.uint16 else llvm.interleave(builder, *args[1:])
        return context.make_tuple(builder, signature.return_type, vectors)

    return types.UniTuple(F32x16, 2)(tag, F32x16, F32x16), codegen


@intrinsic
def store(typingctx: Any, tag: Any, address: Any, index: Any, value: Any) -> Any:
    """Writes 16 elements from ``index`` on, each rounded to nearest even."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element = llvm.MEMORY_TYPES[tag]
        vector = llvm.narrow(builder, args[3], element)
        pointer = llvm.pointer(builder, element, args[1], args[2])
        builder.store(vector, builder.bitcast(pointer, vector.type.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.none(tag, types.int64, types.int64, F32x16), codegen


def _line_stores(tag: Any, builder: Any, args: Any, pack: Any) -> list[Any]:
    """Stores two vectors of 16 elements as whole cache lines, if the address begins one."""
    element = llvm.MEMORY_TYPES[tag]
    vectors = args[3:]
    if element != llvm.F32:
        vectors = [pack(builder, *vectors, element)]
    if element == llvm.F16:
        vectors = [llvm.as_integers(builder, vectors[0], args[1])]
    place = llvm.pointer(builder, element, args[1], args[2])
    places = [builder.gep(builder.bitcast(place, v.type.as_pointer()), [llvm.I64(i)]) for i, v in enumerate(vectors)]
    return [builder.store(vector, place, align=1) for vector, place in zip(vectors, places, strict=True)]


def _stream(tag: Any, builder: Any, args: Any, pack: Any) -> None:
    for written in _line_stores(tag, builder, args, pack):
        written.align = 64
        written.set_metadata("nontemporal", builder.module.add_metadata([llvm.I32(1)]))


@intrinsic
def store_line(typingctx: Any, tag: Any, address: Any, index: Any, first: Any, second: Any) -> Any:
    """Writes 32 elements from ``index`` on, in the order of `load_line`, each rounded to nearest even."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _line_stores(tag, builder, args, llvm.pack_line)
        return context.get_dummy_value()

    return types.none(tag, types.int64, types.int64, F32x16, F32x16), codegen


@intrinsic
def stream_line(typingctx: Any, tag: Any, address: Any, index: Any, first: Any, second: Any) -> Any:
    """As `store_line`, but bypasses the caches. The address must begin a cache line."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _stream(tag, builder, args, llvm.pack_line)
        return context.get_dummy_value()

    return types.none(tag, types.int64, types.int64, F32x16, F32x16), codegen


@intrinsic
def stream(typingctx: Any, tag: Any, address: Any, index: Any, low: Any, high: Any) -> Any:
    """As `stream_line`, but writes the 16 elements of ``low``, then those of ``high``.

    Half a line of 16-bit elements would go through the caches, as LLVM merges narrowing and storing.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _stream(tag, builder, args, llvm.pack)
        return context.get_dummy_value()

    return types.none(tag, types.int64, types.int64, F32x16, F32x16), codegen


@intrinsic
def zero(typingctx: Any) -> Any:
    """Zeros in float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(llvm.F32X16, [0.0] * LANES)

    return F32x16(), codegen


@intrinsic
def add(typingctx: Any, a: Any, b: Any) -> Any:
    """``a + b``, both float32 or both float64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fadd(*args)

    return a(a, a), codegen


@intrinsic
def sub(typingctx: Any, a: Any, b: Any) -> Any:
    """``a - b``, both float32 or both float64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fsub(*args)

    return a(a, a), codegen


@intrinsic
def mul(typingctx: Any, a: Any, b: Any) -> Any:
    """``a * b``, both float32 or both float64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fmul(*args)

    return a(a, a), codegen


@intrinsic
def fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c``, rounded once; all float32 or all float64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return llvm.fma(builder, *args)

    return a(a, a, a), codegen


@intrinsic
def keep_head(typingctx: Any, value: Any, count: Any) -> Any:
    """The first ``count`` lanes; the others become zero, even if they are not finite."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        zeros = ir.Constant(llvm.F32X16, [0.0] * LANES)
        return builder.select(llvm.head_mask(builder, args[1]), args[0], zeros)

    return F32x16(F32x16, types.int64), codegen


@intrinsic
def load_scalar(typingctx: Any, tag: Any, address: Any, index: Any) -> Any:
    """One element as float32, float64 where the tag is a float64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element = llvm.MEMORY_TYPES[tag]
        pointer = llvm.pointer(builder, element, args[1], args[2])
        return llvm.widen_scalar(builder, builder.load(pointer, align=1))

    result = types.float64 if tag == types.float64 else types.float32
    return result(tag, types.int64, types.int64), codegen


@intrinsic
def store_scalar(typingctx: Any, tag: Any, address: Any, index: Any, value: Any) -> Any:
    """Writes one float64, rounded once to nearest even to the element type of the tag."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element = llvm.MEMORY_TYPES[tag]
        pointer = llvm.pointer(builder, element, args[1], args[2])
        builder.store(llvm.narrow_scalar(builder, args[3], element), pointer, align=1)
        return context.get_dummy_value()

    return types.none(tag, types.int64, types.int64, types.float64), codegen
