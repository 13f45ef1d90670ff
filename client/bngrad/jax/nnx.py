"""Batch normalisation for Flax NNX, whose gradients a bngrad client computes. Experimental.

    norm = bngrad.jax.nnx.BatchNorm(64, client=client, rngs=rngs)

Needs the extra ``bngrad[jax]``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

try:
    from flax import nnx
    from flax.nnx.nn.dtypes import promote_dtype
except ImportError as error:
    raise ImportError("bngrad.jax.nnx needs Flax: pip install '.[jax]' in a checkout of bngrad") from error

import jax.numpy as jnp

from bngrad._client import Client, check_client
from bngrad.jax import _DTYPES, batch_norm
from bngrad.typing import DataFormat

__all__ = ["BatchNorm"]


@dataclass(frozen=True)
class _ClientReference:
    """A layer's reference to its client: copies of the layer share the client, pickles leave it out."""

    client: Client | None = None

    def __post_init__(self) -> None:
        if self.client is not None:
            check_client(self.client)

    def __deepcopy__(self, memo: dict[int, Any]) -> _ClientReference:
        return self

    def __reduce__(self) -> tuple[type[_ClientReference], tuple[()]]:
        return _ClientReference, ()


class BatchNorm(nnx.BatchNorm):  # type: ignore[misc] # Flax is not followed by mypy
    """``flax.nnx.BatchNorm`` whose gradients a client computes.

    The client computes the gradients in training, for inputs of 2 to 5 dimensions in float32, float16 or bfloat16, with
    the channels last or second. Anything else is Flax's own: evaluation, masks, ``axis_name``, other dtypes, and every
    layer without a client. Statistics are computed in float32, in two passes.

    The client is no part of the layer's state: copies share it, pickles leave it out.
    """

    def __init__(self, num_features: int, *, client: Client | None = None, **options: Any) -> None:
        """Takes the arguments of ``flax.nnx.BatchNorm``, and a client."""
        super().__init__(num_features, **options)
        self._reference = _ClientReference(client)

    @property
    def client(self) -> Client | None:
        """What computes the gradients; None for JAX."""
        return self._reference.client

    @client.setter
    def client(self, client: Client | None) -> None:
        self._reference = _ClientReference(client)

    def __call__(self, x: Any, use_running_average: bool | None = None, *, mask: Any = None) -> Any:
        """Normalises x as Flax does.

        Args:
            x: The input; sharded over several devices it is refused, as by `bngrad.jax.batch_norm`.
            use_running_average: Whether the running statistics are used; None for the layer's own choice.
            mask: The elements that count; None for all.
        """
        scale, bias = (None if each is None else each[...] for each in (self.scale, self.bias))
        values = (x, self.mean[...], self.var[...], scale, bias)
        if hasattr(self, "promote_dtype"):
            promoted, *_ = self.promote_dtype(values, dtype=self.dtype)
        else:  # Flax before 0.11 rounds the output alone
            promoted, *_ = promote_dtype(values)
        uses_average = self.use_running_average if use_running_average is None else use_running_average
        as_4d = _as_4d(promoted, self.axis)
        is_plain = uses_average is not None and not uses_average and mask is None and self.axis_name is None
        if self.client is None or as_4d is None or not is_plain:
            return super().__call__(x, use_running_average, mask=mask)
        shape, data_format = as_4d
        gamma = jnp.ones(self.num_features, jnp.float32) if scale is None else scale.astype(jnp.float32)
        beta = jnp.zeros(self.num_features, jnp.float32) if bias is None else bias.astype(jnp.float32)
        y, mean, variance = batch_norm(
            promoted.reshape(shape), gamma, beta, client=self.client, epsilon=self.epsilon, data_format=data_format
        )
        for kept, found in ((self.mean, mean), (self.var, variance)):
            kept[...] = self.momentum * kept[...] + (1 - self.momentum) * found
        return y.reshape(x.shape).astype(self.dtype or y.dtype)


def _as_4d(x: Any, axis: Any) -> tuple[tuple[int, ...], DataFormat] | None:
    """Returns the shape and the data format with which x is a tensor that a client takes; None if there are none."""
    if x.dtype.name not in _DTYPES or not 2 <= x.ndim <= 5:
        return None
    if axis in (-1, x.ndim - 1):
        return (x.shape[0], 1, math.prod(x.shape[1:-1]), x.shape[-1]), "NHWC"
    return ((*x.shape[:2], 1, math.prod(x.shape[2:])), "NCHW") if axis in (1, 1 - x.ndim) else None
