"""The LLVM instructions behind `simd`."""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import types

from bngrad_kernels.cpu.plan import LANES

F32 = ir.FloatType()
F64 = ir.DoubleType()
F16 = ir.HalfType()
I1 = ir.IntType(1)
I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
F32X16 = ir.VectorType(F32, LANES)
F64X16 = ir.VectorType(F64, LANES)
I1X16 = ir.VectorType(I1, LANES)
I32X16 = ir.VectorType(I32, LANES)

MEMORY_TYPES = {types.float64: F64, types.float32: F32, types.int16: F16, types.uint16: I16}
"""The type in memory of each tag's elements; bfloat16 is an integer, for CPUs without bfloat16 instructions."""


def itemsize(element: Any) -> int:
    """The size of an element in bytes."""
    return {F64: 8, F32: 4, F16: 2, I16: 2}[element]


def pointer(builder: Any, element: Any, address: Any, index: Any) -> Any:
    """The pointer to an element."""
    return builder.gep(builder.inttoptr(address, element.as_pointer()), [index])


def splat(builder: Any, value: Any, lanes: int) -> Any:
    """A scalar in all lanes."""
    vector = ir.VectorType(value.type, lanes)
    single = builder.insert_element(ir.Constant(vector, ir.Undefined), value, I32(0))
    return builder.shuffle_vector(single, single, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))


def slice_lanes(builder: Any, vector: Any, start: int, count: int) -> Any:
    """``count`` lanes from ``start`` on."""
    lanes = ir.Constant(ir.VectorType(I32, count), list(range(start, start + count)))
    return builder.shuffle_vector(vector, vector, lanes)


def join(builder: Any, low: Any, high: Any) -> Any:
    """The lanes of two vectors."""
    lanes = ir.Constant(ir.VectorType(I32, 2 * LANES), list(range(2 * LANES)))
    return builder.shuffle_vector(low, high, lanes)


def load_line(builder: Any, place: Any, element: Any) -> list[Any]:
    """32 elements as two vectors of float32; of bfloat16 the even ones, then the odd ones."""
    if element == I16:
        pairs = builder.load(builder.bitcast(place, I32X16.as_pointer()), align=1)
        halves = builder.shl(pairs, _constant(I32X16, 16)), builder.and_(pairs, _constant(I32X16, 0xFFFF0000))
        return [builder.bitcast(half, F32X16) for half in halves]
    vectors = builder.bitcast(place, ir.VectorType(element, LANES).as_pointer())
    return [widen(builder, builder.load(builder.gep(vectors, [I64(i)]), align=1)) for i in range(2)]


def deinterleave(builder: Any, low: Any, high: Any) -> list[Any]:
    """The even lanes of two vectors, and the odd ones."""
    lanes = [ir.Constant(I32X16, list(range(start, 2 * LANES, 2))) for start in range(2)]
    return [builder.shuffle_vector(low, high, each) for each in lanes]


def interleave(builder: Any, even: Any, odd: Any) -> list[Any]:
    """The reverse of `deinterleave`."""
    lanes = [[i // 2 + i % 2 * LANES for i in range(start, start + LANES)] for start in (0, LANES)]
    return [builder.shuffle_vector(even, odd, ir.Constant(I32X16, each)) for each in lanes]


def pack(builder: Any, low: Any, high: Any, element: Any) -> Any:
    """Two vectors rounded to nearest even, to the 16-bit type that is stored, as one vector; see `narrow`."""
    if element == F16:
        return join(builder, *(builder.fptrunc(half, ir.VectorType(F16, LANES)) for half in (low, high)))
    # The upper halves of all lanes are picked by one instruction, where the CPU has it.
    pairs = ir.VectorType(I16, 2 * LANES)
    low, high = (builder.bitcast(_rounded(builder, half, I32X16), pairs) for half in (low, high))
    upper = ir.Constant(ir.VectorType(I32, 2 * LANES), list(range(1, 4 * LANES, 2)))
    return builder.shuffle_vector(low, high, upper)


def pack_line(builder: Any, first: Any, second: Any, element: Any) -> Any:
    """As `pack`, but in the order of `load_line`."""
    if element == F16:
        return pack(builder, first, second, element)
    even, odd = (_rounded(builder, half, I32X16) for half in (first, second))
    upper = builder.and_(odd, _constant(I32X16, 0xFFFF0000))
    return builder.bitcast(builder.or_(builder.lshr(even, _constant(I32X16, 16)), upper), ir.VectorType(I16, 2 * LANES))


def as_integers(builder: Any, halves: Any, address: Any) -> Any:
    """The bits of float16 lanes as integers, since LLVM has no non-temporal stores of 16-bit floats.

    The xor changes nothing, as the highest bit of any address is 0, but LLVM cannot know that and optimise it away.
    """
    integers = ir.VectorType(I16, 2 * LANES)
    nothing = splat(builder, builder.trunc(builder.lshr(address, I64(63)), I16), 2 * LANES)
    return builder.xor(builder.bitcast(halves, integers), nothing)


def head_mask(builder: Any, count: Any) -> Any:
    """True in the first ``count`` lanes; in all if it is above 16, in none if it is negative."""
    full = builder.icmp_signed(">", count, I64(LANES))
    clipped = builder.trunc(builder.select(full, I64(LANES), count), I32)
    lanes = ir.Constant(I32X16, list(range(LANES)))
    return builder.icmp_signed("<", lanes, splat(builder, clipped, LANES))


def prefetch(builder: Any, place: Any, level: int) -> None:
    """Prefetches the cache line at a pointer, for reading, to the cache of a level: 1 or 2."""
    byte = ir.IntType(8).as_pointer()
    function = declare(builder, "llvm.prefetch.p0", ir.VoidType(), [byte, I32, I32, I32])
    builder.call(function, [builder.bitcast(place, byte), I32(0), I32(4 - level), I32(1)])


def pause(builder: Any) -> None:
    """Does nothing for a moment, in which the other thread of an x86 core runs faster."""
    if platform.machine() == "x86_64":
        builder.call(declare(builder, "llvm.x86.sse2.pause", ir.VoidType(), []), [])
    elif platform.machine() == "aarch64":
        builder.call(declare(builder, "llvm.aarch64.isb", ir.VoidType(), [I32]), [I32(15)])


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c``, rounded once."""
    suffix = "f32" if a.type == F32X16 else "f64"
    function = declare(builder, f"llvm.fma.v{LANES}{suffix}", a.type, [a.type] * 3)
    return builder.call(function, [a, b, c])


def sqrt(builder: Any, vector: Any) -> Any:
    """The square roots of 16 float64."""
    return builder.call(declare(builder, f"llvm.sqrt.v{LANES}f64", F64X16, [F64X16]), [vector])


def widen(builder: Any, vector: Any) -> Any:
    """Loaded lanes as float32."""
    if vector.type.element == F32:
        return vector
    if vector.type.element == F16:
        return builder.fpext(vector, F32X16)
    bits = builder.shl(builder.zext(vector, I32X16), ir.Constant(I32X16, [16] * LANES))
    return builder.bitcast(bits, F32X16)


def narrow(builder: Any, vector: Any, element: Any) -> Any:
    """Lanes rounded to nearest even, to the type that is stored.

    For bfloat16 the lower half of a NaN has to be zeros, as it is cut off. It is if the NaN comes from 16-bit numbers,
    from an invalid operation, or from `quiet`.
    """
    if element == F32:
        return vector
    if element == F16:
        return builder.fptrunc(vector, ir.VectorType(F16, LANES))
    return _upper_halves(builder, vector, I32X16)


def widen_scalar(builder: Any, value: Any) -> Any:
    """A loaded element as float32; a float64 stays one."""
    if value.type == F16:
        return builder.fpext(value, F32)
    if value.type == I16:
        return builder.bitcast(builder.shl(builder.zext(value, I32), I32(16)), F32)
    return value


def narrow_scalar(builder: Any, value: Any, element: Any) -> Any:
    """A float64 rounded once to nearest even."""
    if element == F64:
        return value
    if element == I16:
        return _upper_halves(builder, _round_to_odd(builder, quiet(builder, value)), I32)
    return builder.fptrunc(quiet(builder, value), element)


def _round_to_odd(builder: Any, value: Any) -> Any:
    """A float32 that rounds to the same bfloat16 as the float64 itself.

    Rounding to nearest twice can go wrong at a tie that the first rounding created. Rounding to odd records in the last
    bit that something was cut off.
    """
    nearest = builder.fptrunc(value, F32)
    back = builder.fpext(nearest, F64)
    bits = builder.bitcast(nearest, I32)
    magnitude, back_magnitude = (builder.and_(builder.bitcast(v, I64), I64(2**63 - 1)) for v in (value, back))
    # One step towards zero if the nearest is further from zero than the value; then set the last bit to make it odd.
    away = builder.icmp_unsigned(">", back_magnitude, magnitude)
    towards_zero = builder.sub(bits, builder.zext(away, I32))
    inexact = builder.and_(
        builder.icmp_unsigned("!=", back_magnitude, magnitude), builder.fcmp_ordered("ord", value, value)
    )
    odd = builder.or_(towards_zero, I32(1))
    return builder.bitcast(builder.select(inexact, odd, bits), F32)


def quiet(builder: Any, value: Any) -> Any:
    """A float64, or each of a vector, in which any NaN is replaced by the default NaN."""
    is_nan = builder.fcmp_unordered("uno", value, value)
    nan = float("nan")
    return builder.select(is_nan, ir.Constant(value.type, nan if value.type == F64 else [nan] * LANES), value)


def declare(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    """A function that is defined elsewhere, such as an instruction of LLVM."""
    known = builder.module.globals.get(name)
    return known if known is not None else ir.Function(builder.module, ir.FunctionType(result, arguments), name)


def _upper_halves(builder: Any, value: Any, integer: Any) -> Any:
    """The upper halves of float32 values, rounded to nearest even."""
    narrow_type = ir.VectorType(I16, LANES) if integer == I32X16 else I16
    shifted = builder.lshr(_rounded(builder, value, integer), _constant(integer, 16))
    return builder.trunc(shifted, narrow_type)


def _rounded(builder: Any, value: Any, integer: Any) -> Any:
    """The bits of float32 values, whose upper halves are rounded to nearest even."""
    bits = builder.bitcast(value, integer)
    lowest = builder.and_(builder.lshr(bits, _constant(integer, 16)), _constant(integer, 1))
    return builder.add(bits, builder.add(lowest, _constant(integer, 0x7FFF)))


def _constant(integer: Any, number: int) -> Any:
    return ir.Constant(integer, [number] * LANES if integer == I32X16 else number)
