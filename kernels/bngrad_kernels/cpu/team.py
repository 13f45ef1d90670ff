"""The call of a kernel, and what a kernel asks of the threads that compute it, its team."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import from_dtype, types
from numba.extending import intrinsic

from bngrad_kernels.cpu.plan import CALL, RECORD


def _at(dtype: np.dtype[Any]) -> Any:
    """Makes the function that returns the record of a dtype at an address."""
    result = from_dtype(dtype)

    @intrinsic
    def at(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(result))

        return result(types.int64), codegen

    return at


call_at, record_at = _at(CALL), _at(RECORD)


@intrinsic
def number(typingctx: Any, function: Any) -> Any:
    """Calls a C function, by its address, that takes nothing and returns an int."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        integer = ir.IntType(32)
        pointer = builder.inttoptr(args[0], ir.FunctionType(integer, []).as_pointer())
        return builder.sext(builder.call(pointer, []), ir.IntType(64))

    return types.int64(types.int64), codegen


@intrinsic
def wait(typingctx: Any, function: Any) -> Any:
    """Calls a C function, by its address, that takes and returns nothing: the barrier of a team."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.call(builder.inttoptr(args[0], ir.FunctionType(ir.VoidType(), []).as_pointer()), [])
        return context.get_dummy_value()

    return types.none(types.int64), codegen
