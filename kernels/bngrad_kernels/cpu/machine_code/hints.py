"""What the compiler or the processor is told of loads, stores and calls, for Numba."""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from bngrad_kernels.cpu import llvm
from bngrad_kernels.cpu.plan import LANES


@intrinsic
def prefetch(typingctx: Any, tag: Any, address: Any, index: Any) -> Any:
    """Prefetches the cache lines of 32 elements that begin one, to the first-level cache; any address is allowed."""
    return _prefetch(tag, 1)


@intrinsic
def prefetch_far(typingctx: Any, tag: Any, address: Any, index: Any) -> Any:
    """Does as `prefetch`, but to the second-level cache, which can wait for more lines at once."""
    return _prefetch(tag, 2)


def _prefetch(tag: Any, level: int) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element = llvm.MEMORY_TYPES[tag]
        for start in range(0, 2 * LANES, 64 // llvm.itemsize(element)):
            index = builder.add(args[2], llvm.I64(start))
            llvm.prefetch(builder, llvm.pointer(builder, element, args[1], index), level)
        return context.get_dummy_value()

    return types.none(tag, types.int64, types.int64), codegen


@intrinsic
def fence(typingctx: Any) -> Any:
    """Orders streamed stores before all later stores; nothing else does."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.none(), codegen


@intrinsic
def in_order(typingctx: Any) -> Any:
    """Keeps the compiler from moving loads and stores past this place; the processor is free to."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("acq_rel", "singlethread")
        return context.get_dummy_value()

    return types.none(), codegen


@intrinsic
def out_of_line(typingctx: Any) -> Any:
    """Prevents inlining of the calling function, which each of its own callers would compile again."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.none(), codegen
