"""Lets a server compute the gradients of TensorFlow's batch norm, in eager code and in graphs.

python examples/tensorflow_gradient.py localhost:50051
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np
import tensorflow as tf

import bngrad
import bngrad.tensorflow


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
        bngrad.tensorflow.install(client)
        ours = gradients()
    names = ("x", "scale", "offset", "scale of a penalty on the gradient of x")
    for name, our, their in zip(names, ours, theirs, strict=True):
        difference = tf.reduce_max(abs(our - their)) / tf.reduce_max(abs(their))
        print(f"gradient of {name}: {our.shape}, differs from TensorFlow's by {difference:.1e} of the largest value")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="the server: HOST:PORT or unix:PATH")
    try:
        main(parser.parse_args().target)
    except bngrad.BngradError as error:
        sys.exit(f"{parser.prog}: {error}")
