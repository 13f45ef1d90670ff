"""TensorFlow: the gradient ops themselves, run eagerly on the CPU."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# TensorFlow leaves oneDNN, its faster kernels, to those who ask for it where a processor has no AVX-512.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

import numpy as np
import tensorflow as tf
from benchmarks.peers import UnsupportedError

from bngrad_kernels.problem import Array, Problem
from bngrad_kernels.spec import ReserveSpace2Kind, Spec

_DATA_FORMATS = {(4, 3): "NHWC", (4, 1): "NCHW", (5, 4): "NDHWC", (5, 1): "NCDHW"}


class TensorFlowKernel:
    """``FusedBatchNormGradV3``, or V2 where asked. TensorFlow allocates its own outputs."""

    def __init__(self, problem: Problem, *, version: int = 3) -> None:
        spec = problem.spec
        self._op = tf.raw_ops.FusedBatchNormGradV3 if version == 3 else tf.raw_ops.FusedBatchNormGradV2
        self._arguments = {
            "y_backprop": tf.constant(problem.y_backprop),
            "x": tf.constant(problem.x),
            "scale": tf.constant(problem.scale),
            "reserve_space_1": tf.constant(problem.reserve_space_1),
            "reserve_space_2": tf.constant(problem.reserve_space_2),
            **({"reserve_space_3": tf.zeros(0)} if version == 3 else {}),
            "epsilon": spec.epsilon,
            "data_format": data_format(spec),
            "is_training": spec.is_training,
        }
        # Some formats are refused by the kernel, not by the op: only running it shows that.
        try:
            self.run()
        except (tf.errors.UnimplementedError, tf.errors.InvalidArgumentError) as error:
            raise UnsupportedError(str(error)) from error

    def run(self) -> None:
        self._outputs = self._op(**self._arguments)

    def gradients(self) -> tuple[Array, Array, Array]:
        x_backprop, scale_backprop, offset_backprop = (np.asarray(output) for output in self._outputs[:3])
        return x_backprop, scale_backprop, offset_backprop


def prepare(problem: Problem) -> TensorFlowKernel:
    spec = problem.spec
    if spec.reserve_space_2_kind is not ReserveSpace2Kind.VARIANCE or problem.scale is None:
        raise UnsupportedError("TensorFlow's CPU kernels take a scale and a variance")
    return TensorFlowKernel(problem)


def data_format(spec: Spec) -> str:
    try:
        return _DATA_FORMATS[len(spec.shape), spec.channel_axis]
    except KeyError:
        raise UnsupportedError("TensorFlow takes rank 4 and 5") from None


def version() -> str:
    return str(tf.__version__)
