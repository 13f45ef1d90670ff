"""Batch normalisation for JAX, whose gradients a bngrad client computes. Experimental.

    y, mean, variance = bngrad.jax.batch_norm(x, scale, offset, client=client)

Needs the extra ``bngrad[jax]``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, get_args

try:
    import jax
    import jax.numpy as jnp
except ImportError as error:
    raise ImportError("bngrad.jax needs JAX: pip install '.[jax]' in a checkout of bngrad") from error

import numpy as np

from bngrad._client import Client, check_client
from bngrad.jax._host_call import call_host
from bngrad.typing import Array, DataFormat

__all__ = ["batch_norm"]

_DTYPES = ("float16", "bfloat16", "float32")
_DATA_FORMATS: tuple[DataFormat, ...] = get_args(DataFormat)


def batch_norm(
    x: Any, scale: Any, offset: Any, *, client: Client, epsilon: float = 1e-5, data_format: DataFormat = "NHWC"
) -> tuple[Any, Any, Any]:
    """Normalises x by its own mean and variance, as in training; the client computes the gradient.

    ``y = (x - mean) / sqrt(variance + epsilon) * scale + offset``, computed by JAX in float32 and rounded to the dtype
    of x. It can be compiled by ``jax.jit``, differentiated twice in reverse, and mapped by ``jax.vmap``, which merges
    the mapped dimension into the channels: still one call. In ``jax.shard_map(..., check_vma=False)`` each shard is
    normalised by itself. Mean and variance are returned for moving averages; no gradient flows through them.

    In compiled functions, an error of the client is an error of JAX's runtime that contains its text; elsewhere it is
    raised as it is.

    Args:
        x: float16, bfloat16 or float32; 4-D or 5-D, on one device.
        scale: Gamma; float32, shape (C,).
        offset: Beta; float32, shape (C,).
        client: Computes the gradients; it must stay open as long as they are.
        epsilon: Added to the variance.
        data_format: "NHWC" or "NCHW" for 4-D, "NDHWC" or "NCDHW" for 5-D.

    Returns:
        y, of the dtype and shape of x; the mean and the biased variance of each channel, float32 of shape (C,).

    Raises:
        TypeError: x, scale or offset is no array or has another dtype, or the client is no `bngrad.Client`.
        ValueError: There is no such data format, or x is sharded over several devices, or has another number of
            dimensions than the data format, or scale or offset has another shape.
        jax.errors.JaxRuntimeError: x is sharded, and the function is compiled; it contains the same sentence.
    """
    check_client(client)
    if data_format not in _DATA_FORMATS:
        raise ValueError(f"data_format must be one of {', '.join(_DATA_FORMATS)}, not {data_format!r}")
    for name, values in (("x", x), ("scale", scale), ("offset", offset)):
        if not (hasattr(values, "dtype") and hasattr(values, "shape")):
            raise TypeError(f"{name} must be an array of JAX or NumPy, not {type(values).__name__}")
    if x.ndim != len(data_format):
        raise ValueError(f"x must be {len(data_format)}-dimensional for data_format {data_format}, not {x.shape}")
    _check_dtypes(x, scale, offset)
    channels = x.shape[data_format.index("C")]
    for name, values in (("scale", scale), ("offset", offset)):
        if values.shape != (channels,):
            raise ValueError(f"{name} must have shape ({channels},), as x has {channels} channels, not {values.shape}")
    jax.debug.inspect_array_sharding(jnp.asarray(x), callback=_check_sharding)
    y, mean, variance = _batch_norm(x, scale, offset, client, float(epsilon), data_format)
    return y, mean, variance


def _check_dtypes(x: Any, scale: Any, offset: Any) -> None:
    """Refuses what the client would refuse in the backward pass."""
    if x.dtype.name not in _DTYPES:
        raise TypeError(f"x must have dtype {', '.join(_DTYPES[:-1])} or {_DTYPES[-1]}, not {x.dtype}")
    for name, values in (("scale", scale), ("offset", offset)):
        if values.dtype != jnp.float32:
            raise TypeError(f"{name} must have dtype float32, not {values.dtype}")


def _check_sharding(sharding: Any) -> None:
    """Refuses x while its program is compiled: XLA would move it to one device, without a word."""
    if sharding.num_devices > 1 and not sharding.is_fully_replicated:
        devices = f"not sharded over {sharding.num_devices}"
        raise ValueError(f"x must be on one device, {devices}: call batch_norm in jax.shard_map(..., check_vma=False)")


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _batch_norm(x: Any, scale: Any, offset: Any, client: Client, epsilon: float, data_format: DataFormat) -> Any:
    return _forward(x, scale, offset, client, epsilon, data_format)[0]


def _forward(x: Any, scale: Any, offset: Any, client: Client, epsilon: float, data_format: DataFormat) -> Any:
    channels = data_format.index("C")
    axes = tuple(axis for axis in range(x.ndim) if axis != channels)
    wide = x.astype(jnp.float32)
    mean, variance = wide.mean(axes, keepdims=True), wide.var(axes, keepdims=True)
    shape = mean.shape
    y = (wide - mean) * jax.lax.rsqrt(variance + epsilon) * scale.reshape(shape) + offset.reshape(shape)
    mean, variance = mean.reshape(-1), variance.reshape(-1)
    return (y.astype(x.dtype), mean, variance), (x, scale, mean, variance)


def _backward(client: Client, epsilon: float, data_format: DataFormat, saved: Any, outputs: Any) -> Any:
    x, scale, mean, variance = saved
    return _gradient(outputs[0], x, scale, mean, variance, client, epsilon, data_format)


_batch_norm.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _gradient(
    y_backprop: Any, x: Any, scale: Any, mean: Any, variance: Any, client: Client, epsilon: float, data_format: Any
) -> Any:
    def call(*arrays: Any) -> tuple[Array, ...]:
        method: Callable[..., tuple[Array, ...]] = client.fused_batch_norm_grad_v3
        return method(*arrays, None, epsilon=epsilon, data_format=data_format)[:3]

    return _called(call, data_format, (x, scale, scale), y_backprop, x, scale, mean, variance)


def _gradient_forward(*arguments: Any) -> Any:
    return _gradient(*arguments), arguments[:5]


def _gradient_backward(client: Client, epsilon: float, data_format: Any, saved: Any, grads: Any) -> Any:
    def call(*arrays: Any) -> tuple[Array, ...]:
        method: Callable[..., tuple[Array, ...]] = client.fused_batch_norm_grad_grad
        return method(*arrays, epsilon=epsilon, data_format=data_format)

    _, x, scale, mean, variance = saved
    found = _called(call, data_format, (x, x, scale), *grads, *saved)
    # The second order knows mean and variance as functions of x.
    return (*found, jnp.zeros_like(mean), jnp.zeros_like(variance))


_gradient.defvjp(_gradient_forward, _gradient_backward)


def _called(call: Callable[..., tuple[Array, ...]], data_format: DataFormat, like: Any, *tensors: Any) -> Any:
    """Has the compiled program make a call, whose outputs have the shapes and dtypes of ``like``."""

    def host(*arrays: Array) -> tuple[Array, ...]:
        vector_shape = arrays[-1].shape
        merged = [_merged(array, len(vector_shape) - 1, data_format) for array in arrays]
        return tuple(_split(output, vector_shape, data_format) for output in call(*merged))

    return call_host(host, like, *tensors)


def _merged(array: Array, mapped: int, data_format: DataFormat) -> Array:
    """Merges the first dimensions, which ``jax.vmap`` has added, into the channels."""
    if not mapped:
        return array
    channels = data_format.index("C") if array.ndim - mapped > 1 else 0
    moved = np.moveaxis(array, range(mapped), range(channels, channels + mapped))
    shape = moved.shape
    end = channels + mapped + 1
    return moved.reshape(*shape[:channels], math.prod(shape[channels:end]), *shape[end:])


def _split(array: Array, vector_shape: tuple[int, ...], data_format: DataFormat) -> Array:
    """Undoes `_merged`; ``vector_shape`` is that of a tensor with a value for each channel."""
    mapped = len(vector_shape) - 1
    if not mapped:
        return array
    channels = data_format.index("C") if array.ndim > 1 else 0
    split = array.reshape(*array.shape[:channels], *vector_shape, *array.shape[channels + 1 :])
    return np.ascontiguousarray(np.moveaxis(split, range(channels, channels + mapped), range(mapped)))
