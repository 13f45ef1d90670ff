"""How a thread rounds: a program may have made it flush subnormal numbers to zero, by which the bits would differ."""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from bngrad_kernels.cpu import llvm

_MXCSR_DEFAULT = 0x1F80
"""Of the register of x86: rounds to nearest, flushes nothing, and raises no signal."""
_BYTES = ir.IntType(8).as_pointer()


@intrinsic
def begin_default(typingctx: Any) -> Any:
    """Rounds to nearest and keeps subnormal numbers from now on; returns the mode before."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if platform.machine() == "x86_64":
            place = builder.alloca(llvm.I32)
            _x86(builder, "stmxcsr", place)
            before = builder.zext(builder.load(place), llvm.I64)
            _load_x86(builder, llvm.I32(_MXCSR_DEFAULT))
        elif platform.machine() == "aarch64":
            before = builder.call(llvm.declare(builder, "llvm.aarch64.get.fpcr", llvm.I64, []), [])
            _load_aarch64(builder, llvm.I64(0))
        else:
            before = llvm.I64(0)
        return before

    return types.int64(), codegen


@intrinsic
def end_default(typingctx: Any, before: Any) -> Any:
    """Takes back what `begin_default` did."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if platform.machine() == "x86_64":
            _load_x86(builder, builder.trunc(args[0], llvm.I32))
        elif platform.machine() == "aarch64":
            _load_aarch64(builder, args[0])
        return context.get_dummy_value()

    return types.none(types.int64), codegen


def _load_x86(builder: Any, value: Any) -> None:
    place = builder.alloca(llvm.I32)
    builder.store(value, place)
    _x86(builder, "ldmxcsr", place)


def _x86(builder: Any, name: str, place: Any) -> None:
    function = llvm.declare(builder, f"llvm.x86.sse.{name}", ir.VoidType(), [_BYTES])
    builder.call(function, [builder.bitcast(place, _BYTES)])


def _load_aarch64(builder: Any, value: Any) -> None:
    builder.call(llvm.declare(builder, "llvm.aarch64.set.fpcr", ir.VoidType(), [llvm.I64]), [value])
