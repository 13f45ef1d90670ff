"""Vectors of 16 float64 for Numba, see `simd`: the operations that are not the same for float32."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from bngrad_kernels.cpu import llvm
from bngrad_kernels.cpu.plan import LANES
from bngrad_kernels.cpu.simd import F32x16, F64x16


@intrinsic
def zero64(typingctx: Any) -> Any:
    """Zeros in float64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(llvm.F64X16, [0.0] * LANES)

    return F64x16(), codegen


@intrinsic
def widen64(typingctx: Any, value: Any) -> Any:
    """The lanes in float64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(args[0], llvm.F64X16)

    return F64x16(F32x16), codegen


@intrinsic
def load64(typingctx: Any, address: Any, index: Any) -> Any:
    """16 float64 from ``index`` on."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = llvm.pointer(builder, llvm.F64, *args)
        return builder.load(builder.bitcast(pointer, llvm.F64X16.as_pointer()), align=8)

    return F64x16(types.int64, types.int64), codegen


@intrinsic
def store64(typingctx: Any, address: Any, index: Any, value: Any) -> Any:
    """Writes 16 float64 from ``index`` on."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = llvm.pointer(builder, llvm.F64, args[0], args[1])
        builder.store(args[2], builder.bitcast(pointer, llvm.F64X16.as_pointer()), align=8)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, F64x16), codegen


@intrinsic
def total(typingctx: Any, value: Any) -> Any:
    """The sum of 16 float64 lanes, by halves."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = args[0]
        for half in (8, 4, 2, 1):
            low, high = (llvm.slice_lanes(builder, vector, start, half) for start in (0, half))
            vector = builder.fadd(low, high)
        return builder.extract_element(vector, ir.Constant(ir.IntType(32), 0))

    return types.float64(F64x16), codegen


@intrinsic
def splat64(typingctx: Any, value: Any) -> Any:
    """A float64 in all lanes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return llvm.splat(builder, args[0], LANES)

    return F64x16(types.float64), codegen


@intrinsic
def narrow64(typingctx: Any, value: Any) -> Any:
    """The lanes rounded to nearest even to float32; any NaN becomes the default NaN."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fptrunc(llvm.quiet(builder, args[0]), llvm.F32X16)

    return F32x16(F64x16), codegen


@intrinsic
def divide64(typingctx: Any, a: Any, b: Any) -> Any:
    """``a / b``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fdiv(*args)

    return F64x16(F64x16, F64x16), codegen


@intrinsic
def sqrt64(typingctx: Any, value: Any) -> Any:
    """The square roots; NaN of negative numbers."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return llvm.sqrt(builder, args[0])

    return F64x16(F64x16), codegen
