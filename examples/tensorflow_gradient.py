"""Has a server compute the gradients of TensorFlow's batch norm, in eager code and in graphs.

python examples/tensorflow_gradient.py localhost:50051
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import gen_nn_ops

import bngrad


def install(client: bngrad.Client) -> None:
    """Puts a client in the place of TensorFlow's gradient ops. Gradients of these gradients are not defined."""
    gen_nn_ops.fused_batch_norm_grad_v2 = _op(client.fused_batch_norm_grad_v2)
    gen_nn_ops.fused_batch_norm_grad_v3 = _op(client.fused_batch_norm_grad_v3)


def _op(method: Callable[..., tuple[Any, ...]]) -> Callable[..., Any]:
    def op(y_backprop: Any, x: Any, scale: Any, *reserves: Any, name: str | None = None, **arguments: Any) -> Any:
        spaces = {key: arguments.pop(key) for key in list(arguments) if key.startswith("reserve_space_")}
        arguments["data_format"] = tf.compat.as_str(arguments.get("data_format", "NHWC"))  # TensorFlow hands over bytes
        tensors = [tf.convert_to_tensor(tensor) for tensor in (y_backprop, x, scale, *reserves, *spaces.values())]
        dtypes = [tensors[1].dtype] + 4 * [tf.float32]

        def call(*arrays: Any) -> list[Any]:
            try:
                return list(method(*arrays, **arguments))
            except bngrad.InvalidArgumentError as error:
                raise tf.errors.InvalidArgumentError(None, None, str(error)) from error

        outputs = tf.numpy_function(call, tensors, dtypes)
        for output, like in zip(outputs, tensors[1:2] + 2 * tensors[2:3], strict=False):
            output.set_shape(like.shape)
        return outputs

    return op


def main(target: str) -> None:
    rng = np.random.default_rng(0)
    x = tf.constant(rng.standard_normal((32, 28, 28, 64), np.float32))
    weights = tf.constant(rng.standard_normal(x.shape, np.float32))
    scale, offset = tf.Variable(tf.ones(64)), tf.Variable(tf.zeros(64))

    def gradients() -> list[Any]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y, _, _ = tf.compat.v1.nn.fused_batch_norm(x, scale, offset)
            loss = tf.reduce_sum(y * weights)
        result: list[Any] = tape.gradient(loss, [x, scale, offset])
        return result

    theirs = gradients()
    with bngrad.Client(target) as client:
        install(client)
        ours = gradients()
    for name, our, their in zip(("x", "scale", "offset"), ours, theirs, strict=True):
        print(f"gradient of {name}: {our.shape}, differs from TensorFlow's by {abs(our - their).numpy().max():.1e}")


if __name__ == "__main__":
    main(sys.argv[1])
