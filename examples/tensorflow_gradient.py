"""Lets a server compute the gradients of TensorFlow's batch norm, in eager code and in graphs.

python examples/tensorflow_gradient.py localhost:50051
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import gen_nn_ops

import bngrad


def install(client: bngrad.Client) -> None:
    """Replaces TensorFlow's gradient ops by calls of the client; they can be differentiated once more."""
    gen_nn_ops.fused_batch_norm_grad_v2 = _op(client, client.fused_batch_norm_grad_v2)
    gen_nn_ops.fused_batch_norm_grad_v3 = _op(client, client.fused_batch_norm_grad_v3)


def _op(client: bngrad.Client, method: Callable[..., tuple[Any, ...]]) -> Callable[..., Any]:
    def op(y_backprop: Any, x: Any, scale: Any, *reserves: Any, name: str | None = None, **arguments: Any) -> Any:
        spaces = {key: arguments.pop(key) for key in list(arguments) if key.startswith("reserve_space_")}
        arguments["data_format"] = tf.compat.as_str(arguments.get("data_format", "NHWC"))  # TensorFlow passes bytes
        reserves = tuple(map(tf.convert_to_tensor, (*reserves, *spaces.values())))

        @tf.custom_gradient  # type: ignore[untyped-decorator] # TensorFlow has no types
        def gradients(y_backprop: Any, x: Any, scale: Any) -> Any:
            inputs = y_backprop, x, scale

            def second_order(*grads: Any) -> Any:
                tensors = [*grads[:3], *inputs, *reserves[:2]]
                return _called(client.fused_batch_norm_grad_grad, tensors, arguments, inputs)

            nothing = tf.zeros(0)
            outputs = _called(method, [*inputs, *reserves], arguments, [x, scale, scale, nothing, nothing])
            return outputs, second_order

        return gradients(*map(tf.convert_to_tensor, (y_backprop, x, scale)))

    return op


def _called(
    method: Callable[..., tuple[Any, ...]], tensors: Sequence[Any], arguments: dict[str, Any], like: Sequence[Any]
) -> Any:
    """Calls the client with tensors; the outputs have the dtypes and shapes of ``like``."""

    def call(*arrays: Any) -> list[Any]:
        try:
            return list(method(*arrays, **arguments))
        except bngrad.InvalidArgumentError as error:
            raise tf.errors.InvalidArgumentError(None, None, str(error)) from error

    outputs = tf.numpy_function(call, tensors, [tensor.dtype for tensor in like])
    for output, tensor in zip(outputs, like, strict=True):
        output.set_shape(tensor.shape)
    return outputs


def main(target: str) -> None:
    rng = np.random.default_rng(0)
    x = tf.constant(rng.standard_normal((32, 28, 28, 64), np.float32))
    weights = tf.constant(rng.standard_normal(x.shape, np.float32))
    scale, offset = tf.Variable(tf.ones(64)), tf.Variable(tf.zeros(64))

    def gradients() -> list[Any]:
        with tf.GradientTape() as second:
            with tf.GradientTape() as first:
                for tape in (first, second):
                    tape.watch(x)
                y, _, _ = tf.compat.v1.nn.fused_batch_norm(x, scale, offset)
                loss = tf.reduce_sum(y * y * weights)
            result: list[Any] = first.gradient(loss, [x, scale, offset])
            penalty = tf.reduce_sum(result[0] ** 2)
        return [*result, second.gradient(penalty, scale)]

    theirs = gradients()
    with bngrad.Client(target) as client:
        install(client)
        ours = gradients()
    names = ("x", "scale", "offset", "scale of a penalty on the gradient of x")
    for name, our, their in zip(names, ours, theirs, strict=True):
        difference = tf.reduce_max(abs(our - their)) / tf.reduce_max(abs(their))
        print(f"gradient of {name}: {our.shape}, differs from TensorFlow's by {difference:.1e} of the largest value")


if __name__ == "__main__":
    main(sys.argv[1])
