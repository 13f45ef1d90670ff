"""A primitive of JAX that has a compiled program call Python with NumPy arrays.

`jax.pure_callback` makes arrays of JAX of them, and to read such an array waits for a thread of XLA's pool. Each call
holds one of these threads, and there is one for each CPU: as many calls at a time as CPUs would wait for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from bngrad.typing import Array


def call_host(call: Callable[..., tuple[Array, ...]], shapes: Sequence[Any], *tensors: Any) -> Any:
    """Has the program call ``call`` with the tensors, as NumPy arrays; it must not use JAX.

    ``jax.vmap`` adds the mapped dimension to the front of every tensor and output.

    Args:
        call: Returns the outputs.
        shapes: What has their shapes and dtypes.
        tensors: Its arguments.
    """
    avals = tuple(jax.core.ShapedArray(each.shape, each.dtype) for each in shapes)
    return tuple(_primitive.bind(*tensors, call=call, avals=avals))


_primitive = Primitive("bngrad_call")
_primitive.multiple_results = True


def _run(*tensors: Any, call: Callable[..., tuple[Array, ...]], avals: Any) -> Any:
    """Calls where nothing is compiled; a program for each call would take longer to compile than the call."""
    if all(0 in aval.shape for aval in avals):  # mapped over nothing: there is nothing to compute
        return [jnp.zeros(aval.shape, aval.dtype) for aval in avals]
    outputs = call(*map(np.asarray, tensors))
    committed = [each for each in tensors if isinstance(each, jax.Array) and each.committed]
    places = {each.ndim: each.sharding for each in committed}  # a sharding of a tensor does not fit a vector
    device = next((each.sharding for each in committed if each.sharding.num_devices == 1), None)
    return [jax.device_put(output, places.get(output.ndim, device)) for output in outputs]


def _outputs(*_: Any, avals: Any, **__: Any) -> Any:
    return avals


def _lowered(context: Any, *tensors: Any, call: Any, avals: Any) -> Any:
    result, *_ = mlir.emit_python_callback(
        context, call, None, list(tensors), context.avals_in, context.avals_out, has_side_effect=False
    )
    return result


def _mapped(tensors: Any, dimensions: Any, *, call: Any, avals: Any) -> Any:
    size = next(each.shape[axis] for each, axis in zip(tensors, dimensions, strict=True) if axis is not None)
    given = (
        jnp.broadcast_to(each, (size, *each.shape)) if axis is None else jnp.moveaxis(each, axis, 0)
        for each, axis in zip(tensors, dimensions, strict=True)
    )
    mapped = tuple(jax.core.ShapedArray((size, *each.shape), each.dtype) for each in avals)
    return _primitive.bind(*given, call=call, avals=mapped), [0] * len(avals)


def _refuse_derivatives(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("the client has no gradients of the third order")


_primitive.def_impl(_run)
_primitive.def_abstract_eval(_outputs)
mlir.register_lowering(_primitive, _lowered)
ad.primitive_jvps[_primitive] = _refuse_derivatives
batching.primitive_batchers[_primitive] = _mapped
