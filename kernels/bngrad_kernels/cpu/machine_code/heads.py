"""Reads and writes of the first few elements of a vector, where a row or a plane ends."""

from __future__ import annotations

import os
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from bngrad_kernels.cpu import llvm
from bngrad_kernels.cpu.llvm import F16, F32, I16, I32, I64
from bngrad_kernels.cpu.plan import LANES
from bngrad_kernels.cpu.simd import F32x16

_NAMES = {F32: "f32", F16: "f16", I16: "i16"}
_MASKED_LOADS = {"x86-64-v4": {F32, F16, I16}, "x86-64-v3": {F32}}
_MASKED_STORES = {"x86-64-v4": {F32, F16, I16}}
"""By what is compiled for: the elements of which one instruction reads or writes the first few of a vector. Where there
is none, LLVM asks for each element. AVX has one to write float32, but with it some tensors take a Zen 3 half as long
again."""


@intrinsic
def load_head(typingctx: Any, tag: Any, address: Any, index: Any, count: Any) -> Any:
    """The first ``count`` of the 16 elements from ``index`` on, widened, then zeros; reads nothing beyond them."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element = llvm.MEMORY_TYPES[tag]
        load = _masked_load if element in _MASKED_LOADS.get(_target(), ()) else _load_in_pieces
        place = llvm.pointer(builder, element, args[1], args[2])
        return llvm.widen(builder, load(builder, place, element, args[3]))

    return F32x16(tag, types.int64, types.int64, types.int64), codegen


@intrinsic
def store_head(typingctx: Any, tag: Any, address: Any, index: Any, value: Any, count: Any) -> Any:
    """Writes the first ``count`` of 16 elements from ``index`` on, and nothing beyond them."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element = llvm.MEMORY_TYPES[tag]
        store = _masked_store if element in _MASKED_STORES.get(_target(), ()) else _store_in_pieces
        store(
            builder, llvm.narrow(builder, args[3], element), llvm.pointer(builder, element, args[1], args[2]), args[4]
        )
        return context.get_dummy_value()

    return types.none(tag, types.int64, types.int64, F32x16, types.int64), codegen


def _target() -> str:
    """LLVM's name of the processor that is compiled for."""
    return os.environ.get("NUMBA_CPU_NAME", "")


def _masked_load(builder: Any, place: Any, element: Any, count: Any) -> Any:
    vector = ir.VectorType(element, LANES)
    name = f"llvm.masked.load.v{LANES}{_NAMES[element]}.p0"
    function = llvm.declare(builder, name, vector, [vector.as_pointer(), I32, llvm.I1X16, vector])
    place = builder.bitcast(place, vector.as_pointer())
    return builder.call(function, [place, I32(1), llvm.head_mask(builder, count), ir.Constant(vector, None)])


def _masked_store(builder: Any, value: Any, place: Any, count: Any) -> None:
    vector = value.type
    name = f"llvm.masked.store.v{LANES}{_NAMES[vector.element]}.p0"
    function = llvm.declare(builder, name, ir.VoidType(), [vector, vector.as_pointer(), I32, llvm.I1X16])
    place = builder.bitcast(place, vector.as_pointer())
    builder.call(function, [value, place, I32(1), llvm.head_mask(builder, count)])


def _load_in_pieces(builder: Any, place: Any, element: Any, count: Any) -> Any:
    """Reads the last piece first, and shifts it up by the size of the next one."""
    result = ir.Constant(ir.VectorType(element, LANES), None)
    for size, is_there, start in _pieces(builder, count):
        before = builder.block
        with builder.if_then(is_there):
            pointer = builder.bitcast(builder.gep(place, [start]), ir.VectorType(element, size).as_pointer())
            piece = builder.load(pointer, align=1)
            piece = _shuffle(builder, piece, piece, [*range(size), *[0] * (LANES - size)])
            grown = _shuffle(builder, piece, result, [*range(size), *range(LANES, 2 * LANES - size)])
            inside = builder.block
        result = _either(builder, result, before, grown, inside)
    return result


def _store_in_pieces(builder: Any, value: Any, place: Any, count: Any) -> None:
    """Writes the first piece first, and shifts the others down."""
    for size, is_there, start in reversed(_pieces(builder, count)):
        before = builder.block
        with builder.if_then(is_there):
            piece = llvm.slice_lanes(builder, value, 0, size)
            builder.store(piece, builder.bitcast(builder.gep(place, [start]), piece.type.as_pointer()), align=1)
            rest = _shuffle(builder, value, value, [*range(size, LANES), *range(size)])
            inside = builder.block
        value = _either(builder, value, before, rest, inside)


def _pieces(builder: Any, count: Any) -> list[tuple[int, Any, Any]]:
    """The powers of two up to 16; for each, whether ``count`` elements have such a piece, and where it starts.

    There is one piece of 16 if ``count`` is more, and none if it is negative.
    """
    count = builder.select(builder.icmp_signed(">", count, I64(LANES)), I64(LANES), count)
    count = builder.select(builder.icmp_signed("<", count, I64(0)), I64(0), count)
    pieces = []
    for size in (1, 2, 4, 8, LANES):
        is_there = builder.icmp_unsigned("!=", builder.and_(count, I64(size)), I64(0))
        pieces.append((size, is_there, builder.and_(count, I64(-2 * size))))
    return pieces


def _shuffle(builder: Any, first: Any, second: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def _either(builder: Any, value: Any, before: Any, other: Any, inside: Any) -> Any:
    """A value that comes from the block before a condition, or another one from the block inside."""
    phi = builder.phi(value.type)
    phi.add_incoming(value, before)
    phi.add_incoming(other, inside)
    return phi
