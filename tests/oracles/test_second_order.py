"""The second order against TensorFlow's registered gradient and PyTorch's double backward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import torch
from benchmarks.peers.pytorch import channels_second, to_numpy, to_torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bngrad_kernels import backends, tolerances
from bngrad_kernels.problem import Array, GradGradProblem
from bngrad_kernels.spec import BFLOAT16, FLOAT16, FLOAT32, Spec

FORMATS = {(4, 3): "NHWC", (4, 1): "NCHW", (5, 4): "NDHWC", (5, 1): "NCDHW"}
SHAPES = [((4, 5, 6, 7), 3), ((4, 7, 5, 6), 1), ((2, 33, 17, 3), 3), ((2, 3, 4, 5, 6), 4), ((2, 6, 3, 4, 5), 1),
          ((8, 3, 24, 24), 1), ((64, 8, 8, 48), 3)]  # fmt: skip
BACKEND = backends.create("cpu")


def random_inputs(spec: Spec, seed: int = 0, mean: float = 1) -> tuple[Array, ...]:
    """The arguments of the second order, with the reserves that the forward pass of training saves."""
    rng = np.random.default_rng(seed)
    axes = tuple(axis for axis in range(len(spec.shape)) if axis != spec.channel_axis)
    u, dy, x = (rng.normal(m, s, spec.shape).astype(spec.dtype) for m, s in ((0, 1), (0.1, 1), (mean, 2)))
    a, b, scale = rng.uniform(0.5, 2, (3, spec.channels)).astype(np.float32)
    statistics = x.astype(np.float64).mean(axes), x.astype(np.float64).var(axes)
    if not spec.is_training:
        statistics = rng.uniform(0.5, 1.5, spec.channels), rng.uniform(3, 5, spec.channels)
    return u, a, b, dy, x, scale, *(each.astype(np.float32) for each in statistics)


def by_bngrad(spec: Spec, inputs: tuple[Array, ...]) -> tuple[Array, ...]:
    problem = GradGradProblem.allocate(spec, *inputs)
    BACKEND.run([problem])
    return problem.grad_y_backprop, problem.grad_x, problem.grad_scale


def by_tensorflow(spec: Spec, inputs: tuple[Array, ...]) -> tuple[Array, ...]:
    """By what TensorFlow registers as the gradient of FusedBatchNormGradV3, which returns None for the reserves."""
    u, a, b, dy, x, scale, mean, variance = (tf.constant(array) for array in inputs)
    watched = [dy, x, scale]
    with tf.GradientTape() as tape:
        tape.watch(watched)
        gradients = tf.raw_ops.FusedBatchNormGradV3(
            y_backprop=dy, x=x, scale=scale, reserve_space_1=mean, reserve_space_2=variance,
            reserve_space_3=tf.zeros(0), epsilon=spec.epsilon, is_training=spec.is_training,
            data_format=FORMATS[len(spec.shape), spec.channel_axis],
        )  # fmt: skip
    results = tape.gradient(gradients[:3], [*watched, mean, variance], [u, a, b])
    assert results[3:] == [None, None]
    return tuple(result.numpy() for result in results[:3])


def by_pytorch(spec: Spec, inputs: tuple[Array, ...]) -> tuple[Array, ...]:
    """By autograd, through the backward of ``batch_norm``."""
    u, a, b, dy, x, scale, mean, variance = map(to_torch, inputs)
    u, dy, x = (channels_second(spec, tensor) for tensor in (u, dy, x))
    offset = torch.zeros_like(scale)
    for tensor in (dy, x, scale, offset):
        tensor.requires_grad_()
    running = None if spec.is_training else mean, None if spec.is_training else variance
    y = torch.nn.functional.batch_norm(x, *running, scale, offset, training=spec.is_training, eps=spec.epsilon)
    first = torch.autograd.grad(y, (x, scale, offset), dy, create_graph=True)
    grad_dy, grad_x, grad_scale = torch.autograd.grad(first, (dy, x, scale), (u, a, b))
    return (*(to_numpy(each.movedim(1, spec.channel_axis)) for each in (grad_dy, grad_x)), to_numpy(grad_scale))


ORACLES = {"tensorflow": by_tensorflow, "pytorch": by_pytorch}


def assert_agreement(spec: Spec, inputs: tuple[Array, ...], theirs: tuple[Array, ...]) -> None:
    """Asserts that ours is within its bounds, that theirs is the same but for rounding, and that ours is no worse."""
    ours = by_bngrad(spec, inputs)
    our_errors, their_errors = (tolerances.grad_grad_errors(spec, inputs, outputs) for outputs in (ours, theirs))
    bounds = tolerances.grad_grad_bounds(spec)
    for our, their in zip(ours, theirs, strict=True):
        assert (our.shape, our.dtype) == (their.shape, their.dtype)
    for name, our_error, their_error, bound in zip(bounds._fields, our_errors, their_errors, bounds, strict=True):
        assert our_error <= bound, (name, our_error, bound)
        assert their_error <= 100 * bound, (name, their_error, bound)  # they compute the same


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_tensorflows_registered_gradient_agrees(
    shape: tuple[int, ...], axis: int, dtype: Any, is_training: bool
) -> None:
    if not is_training and axis == 1:
        is_training = True  # TensorFlow computes channels-first tensors in training alone
    spec = Spec(dtype, shape, axis, is_training=is_training, epsilon=1e-3, order=2)
    inputs = random_inputs(spec)
    assert_agreement(spec, inputs, by_tensorflow(spec, inputs))


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_pytorchs_double_backward_agrees(shape: tuple[int, ...], axis: int, is_training: bool) -> None:
    spec = Spec(FLOAT32, shape, axis, is_training=is_training, epsilon=1e-3, order=2)
    inputs = random_inputs(spec)
    assert_agreement(spec, inputs, by_pytorch(spec, inputs))


@settings(max_examples=40, deadline=None)
@given(
    peer=st.sampled_from([*ORACLES]),
    dimensions=st.lists(st.integers(1, 9), min_size=3, max_size=4),
    channels=st.integers(1, 70),
    is_training=st.booleans(),
    epsilon=st.floats(2**-10, 1, width=32),
    seed=st.integers(0, 2**32),
)
def test_random_calls_agree_with_the_reference_and_the_oracles(
    peer: str, dimensions: list[int], channels: int, is_training: bool, epsilon: float, seed: int
) -> None:
    if np.prod(dimensions) < 4:  # PyTorch refuses one element a channel, and of two nothing but rounding is left
        dimensions[0] = 4
    spec = Spec(FLOAT32, (*dimensions, channels), len(dimensions), is_training=is_training, epsilon=epsilon, order=2)
    inputs = random_inputs(spec, seed)
    assert_agreement(spec, inputs, ORACLES[peer](spec, inputs))


@pytest.mark.parametrize("peer", ORACLES)
@pytest.mark.parametrize(("shape", "axis"), [((16, 128, 128, 2), 3), ((16, 2, 128, 128), 1)])
def test_a_mean_far_from_zero_costs_no_more_than_it_costs_the_oracle(
    peer: str, shape: tuple[int, ...], axis: int
) -> None:
    spec = Spec(FLOAT32, shape, axis, order=2)
    inputs = random_inputs(spec, mean=1000)
    ours, theirs = by_bngrad(spec, inputs), ORACLES[peer](spec, inputs)
    our_errors, their_errors = (tolerances.grad_grad_errors(spec, inputs, outputs) for outputs in (ours, theirs))
    for name, our_error, their_error in zip(our_errors._fields, our_errors, their_errors, strict=True):
        assert our_error <= their_error, (name, our_error, their_error)
