"""The client's ops as functions of TensorFlow that can be differentiated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from bngrad._client import Client
from bngrad._errors import InvalidArgumentError


def gradients(
    client: Client,
    method: Callable[..., tuple[Any, ...]],
    inputs: Sequence[Any],
    reserves: Sequence[Any],
    arguments: dict[str, Any],
) -> Any:
    """Returns the outputs of one of the client's first-order ops as tensors.

    Args:
        client: Computes the second order.
        method: Its method for the first order.
        inputs: y_backprop, x and scale, by which the outputs can be differentiated.
        reserves: The reserve spaces.
        arguments: The arguments that are not tensors.
    """
    reserves = [tf.convert_to_tensor(reserve) for reserve in reserves]

    @tf.custom_gradient  # type: ignore[untyped-decorator] # TensorFlow has no types
    def first_order(y_backprop: Any, x: Any, scale: Any) -> Any:
        inputs = y_backprop, x, scale

        def second_order(*grads: Any) -> Any:
            return _second_order(client, [*grads[:3], *inputs], reserves[:2], arguments)

        nothing = tf.zeros(0)
        outputs = _called(method, [*inputs, *reserves], arguments, [x, scale, scale, nothing, nothing])
        return outputs, second_order

    return first_order(*map(tf.convert_to_tensor, inputs))


def _second_order(client: Client, inputs: Sequence[Any], reserves: Sequence[Any], arguments: dict[str, Any]) -> Any:
    """Returns the gradients of y_backprop, x and scale, which are the last inputs."""

    @tf.custom_gradient  # type: ignore[untyped-decorator] # TensorFlow has no types
    def second_order(*inputs: Any) -> Any:
        outputs = _called(client.fused_batch_norm_grad_grad, [*inputs, *reserves], arguments, inputs[3:])
        return outputs, _refuse_third_order

    return second_order(*inputs)


def _refuse_third_order(*grads: Any) -> Any:
    """Raises while a graph is built: a call within it that fails would be left out, and zeros taken for its outputs."""
    raise NotImplementedError(
        "the client has no gradients of the third order, which forward mode over reverse mode needs as well: "
        "revert, or uninstall, to let TensorFlow compute them"
    )


def _called(
    method: Callable[..., tuple[Any, ...]], tensors: Sequence[Any], arguments: dict[str, Any], like: Sequence[Any]
) -> Any:
    """Calls the client with tensors; the outputs have the dtypes and shapes of ``like``."""
    if tf.executing_eagerly():  # numpy_function would copy every tensor
        try:
            return [tf.convert_to_tensor(output) for output in method(*tensors, **arguments)]
        except InvalidArgumentError as error:
            raise tf.errors.InvalidArgumentError(None, None, str(error)) from error

    def call(*arrays: Any) -> list[Any]:
        return list(method(*arrays, **arguments))

    # Not stateful: equal requests have equal answers, and one that is not needed is not sent.
    outputs = tf.numpy_function(call, tensors, [tensor.dtype for tensor in like], stateful=False)
    for output, tensor in zip(outputs, like, strict=True):
        output.set_shape(tensor.shape)
    return outputs
