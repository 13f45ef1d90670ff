"""What it means to agree with an oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
from benchmarks import peers
from tests.integration.problems import Inputs

import bngrad
from bngrad.typing import OneDnnDataFormat
from bngrad_kernels import tolerances
from bngrad_kernels.problem import Array, Problem
from bngrad_kernels.spec import Spec

_FORMATS = {(4, 3): "NHWC", (4, 1): "NCHW", (5, 4): "NDHWC", (5, 1): "NCDHW"}


def asked_of(peer: str, spec: Spec, inputs: Inputs) -> tuple[Array, Array, Array]:
    """The gradients by a peer. Raises `benchmarks.peers.UnsupportedError`."""
    kernel = peers.load(peer)(Problem.allocate(spec, *(array.copy() for array in inputs)))
    kernel.run()
    return kernel.gradients()


def asked_of_bngrad(client: bngrad.Client, spec: Spec, inputs: Inputs) -> tuple[Array, ...]:
    """The gradients by the op that takes the shape: V3, or oneDNN's where V3 does not."""
    if (len(spec.shape), spec.channel_axis) in _FORMATS:
        attributes: dict[str, Any] = {
            "epsilon": spec.epsilon,
            "data_format": _FORMATS[len(spec.shape), spec.channel_axis],
            "is_training": spec.is_training,
            "reserve_space_2_kind": spec.reserve_space_2_kind.value,
        }
        return client.fused_batch_norm_grad_v3(*inputs, None, **attributes)
    return asked_of_bngrad_as_onednn(client, spec, inputs)


def asked_of_bngrad_as_onednn(client: bngrad.Client, spec: Spec, inputs: Inputs) -> tuple[Array, ...]:
    """The gradients by `BatchNormTrainingBackprop`."""
    assert spec.is_training
    y_backprop, x, gamma, mean, variance = inputs
    data_format: OneDnnDataFormat = "NXC" if spec.channel_axis == len(spec.shape) - 1 else "NCX"
    return client.batch_norm_training_backprop(
        x, y_backprop, mean, variance, gamma,
        epsilon=spec.epsilon, data_format=data_format, variance_kind=spec.reserve_space_2_kind.value,
    )  # fmt: skip


def assert_agreement(spec: Spec, inputs: Inputs, ours: tuple[Array, ...], theirs: tuple[Array, ...]) -> None:
    """Asserts equal shapes and dtypes, errors of ours within the bounds, and sums no less exact but for rounding.

    A sum of few terms is as exact as three roundings are: of x - mean, of the product, and of the result.
    """
    for our, their in zip(ours, theirs, strict=False):
        assert (our.shape, our.dtype) == (their.shape, their.dtype)
    bounds = tolerances.bounds(spec)
    our_errors, their_errors = tolerances.errors(spec, inputs, ours), tolerances.errors(spec, inputs, theirs)
    for name, our_error, bound in zip(bounds._fields, our_errors, bounds, strict=True):
        assert our_error <= bound, (name, our_error, bound)
    three_roundings = 3 * float(np.finfo(np.float32).eps) / 2
    assert our_errors.scale_backprop <= max(their_errors.scale_backprop, three_roundings), (our_errors, their_errors)
    assert our_errors.offset_backprop <= max(their_errors.offset_backprop, three_roundings), (our_errors, their_errors)


def assert_no_less_exact(spec: Spec, inputs: Inputs, ours: tuple[Array, ...], theirs: tuple[Array, ...]) -> None:
    """Asserts that no error of ours is above theirs, where there is more than rounding to tell them apart."""
    our_errors, their_errors = tolerances.errors(spec, inputs, ours), tolerances.errors(spec, inputs, theirs)
    half_ulp = float(np.finfo(np.float32).eps) / 2
    for name, our_error, their_error in zip(our_errors._fields, our_errors, their_errors, strict=True):
        assert our_error <= max(their_error, half_ulp), (name, our_error, their_error)
