from __future__ import annotations

import numpy as np
import pytest

from bngrad_kernels import reference
from bngrad_kernels.spec import FLOAT32, ReserveSpace2Kind, Spec


def forward(spec: Spec, x: np.ndarray, scale: np.ndarray, mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """Batch normalisation in float64; in training the statistics are x's own."""
    axes = tuple(axis for axis in range(x.ndim) if axis != spec.channel_axis)
    shape = [1] * x.ndim
    shape[spec.channel_axis] = -1
    if spec.is_training:
        mean, variance = x.mean(axes), x.var(axes)
    rstd = 1 / np.sqrt(variance + spec.epsilon)
    return np.asarray((x - mean.reshape(shape)) * (rstd * scale).reshape(shape))


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize(("shape", "axis"), [((3, 2, 4, 5), 3), ((3, 5, 2, 4), 1), ((6, 5), 1)])
def test_the_gradients_are_those_of_the_forward_pass(shape: tuple[int, ...], axis: int, is_training: bool) -> None:
    spec = Spec(FLOAT32, shape, axis, epsilon=0.01, is_training=is_training)
    rng = np.random.default_rng(0)
    dy, x = rng.normal(size=shape), rng.normal(2, 3, size=shape)
    scale, mean, variance = rng.normal(size=5), rng.normal(size=5), rng.uniform(0.5, 2, size=5)
    if is_training:
        axes = tuple(a for a in range(x.ndim) if a != axis)
        mean, variance = x.mean(axes), x.var(axes)

    gradients = reference.fused_batch_norm_grad(spec, dy, x, scale, mean, variance)

    def loss(x: np.ndarray, scale: np.ndarray) -> float:
        return float((forward(spec, x, scale, mean, variance) * dy).sum())

    step = 1e-5
    for index in [(0,) * x.ndim, tuple(length - 1 for length in shape)]:
        moved = np.zeros(shape)
        moved[index] = step
        slope = (loss(x + moved, scale) - loss(x - moved, scale)) / (2 * step)
        assert gradients.x_backprop[index] == pytest.approx(slope, rel=1e-6, abs=1e-8)
    for channel in range(5):
        moved = np.zeros(5)
        moved[channel] = step
        slope = (loss(x, scale + moved) - loss(x, scale - moved)) / (2 * step)
        assert gradients.scale_backprop[channel] == pytest.approx(slope, rel=1e-6, abs=1e-8)
    assert gradients.offset_backprop == pytest.approx(dy.sum(tuple(a for a in range(x.ndim) if a != axis)))


def test_inverse_std_is_taken_as_it_is() -> None:
    variance, epsilon = np.array([0.5, 2.0, 0.0]), 0.25
    rng = np.random.default_rng(1)
    dy, x, scale, mean = rng.normal(size=(8, 3)), rng.normal(size=(8, 3)), rng.normal(size=3), rng.normal(size=3)
    by_variance = Spec(FLOAT32, (8, 3), 1, epsilon=epsilon)
    by_inverse_std = Spec(FLOAT32, (8, 3), 1, epsilon=9, reserve_space_2_kind=ReserveSpace2Kind.INVERSE_STD)
    expected = reference.fused_batch_norm_grad(by_variance, dy, x, scale, mean, variance)
    inverse_std = 1 / np.sqrt(variance + epsilon)
    for ours, theirs in zip(
        reference.fused_batch_norm_grad(by_inverse_std, dy, x, scale, mean, inverse_std), expected, strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-14)


def test_no_scale_counts_as_ones() -> None:
    spec = Spec(FLOAT32, (8, 3), 1)
    rng = np.random.default_rng(2)
    dy, x, mean, variance = rng.normal(size=(8, 3)), rng.normal(size=(8, 3)), rng.normal(size=3), np.ones(3)
    for ours, theirs in zip(
        reference.fused_batch_norm_grad(spec, dy, x, None, mean, variance),
        reference.fused_batch_norm_grad(spec, dy, x, np.ones(3), mean, variance),
        strict=True,
    ):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("shape", [(0, 3), (0, 0), (4, 0)])
def test_empty_inputs_give_zero_sums(shape: tuple[int, int]) -> None:
    empty, stats = np.empty(shape), np.ones(shape[1])
    gradients = reference.fused_batch_norm_grad(Spec(FLOAT32, shape, 1), empty, empty, stats, stats, stats)
    assert gradients.x_backprop.shape == shape
    assert gradients.scale_backprop.tolist() == gradients.offset_backprop.tolist() == [0.0] * shape[1]


@pytest.mark.parametrize("epsilon", [0.01, 2.0])
@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize(("shape", "axis"), [((3, 2, 4, 5), 3), ((3, 5, 2, 4), 1), ((6, 5), 1)])
def test_the_second_order_gradients_are_those_of_the_first_order(
    shape: tuple[int, ...], axis: int, is_training: bool, epsilon: float
) -> None:
    """By central differences of every element, with the mean and variance as functions of x in training."""
    spec = Spec(FLOAT32, shape, axis, epsilon=epsilon, is_training=is_training)
    rng = np.random.default_rng(3)
    dx_grad, dy, x = rng.normal(size=shape), rng.normal(size=shape), rng.normal(2, 3, size=shape)
    a, b, scale, mean = rng.normal(size=(4, 5))
    variance = rng.uniform(0.5, 2, size=5)
    axes = tuple(a for a in range(x.ndim) if a != axis)

    def loss(dy: np.ndarray, x: np.ndarray, scale: np.ndarray) -> float:
        statistics = (x.mean(axes), x.var(axes)) if is_training else (mean, variance)
        gradients = reference.fused_batch_norm_grad(spec, dy, x, scale, *statistics)
        products = (gradients.x_backprop * dx_grad).sum(), gradients.scale_backprop @ a, gradients.offset_backprop @ b
        return float(sum(products))

    inputs = {"dy": dy, "x": x, "scale": scale}
    ignored = np.full(5, np.nan)
    given = (ignored, ignored) if is_training else (mean, variance)
    gradients = reference.fused_batch_norm_grad_grad(spec, dx_grad, a, b, dy, x, scale, *given)
    step = 1e-5
    for (name, value), gradient in zip(inputs.items(), gradients, strict=True):
        slopes = np.empty_like(value)
        for index in np.ndindex(value.shape):
            moved = np.zeros_like(value)
            moved[index] = step
            slopes[index] = loss(**{**inputs, name: value + moved}) - loss(**{**inputs, name: value - moved})
        np.testing.assert_allclose(gradient, slopes / (2 * step), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("shape", [(0, 3), (0, 0), (4, 0)])
def test_empty_inputs_give_zeros_of_the_second_order(shape: tuple[int, int], is_training: bool) -> None:
    empty, stats = np.empty(shape), np.ones(shape[1])
    spec = Spec(FLOAT32, shape, 1, is_training=is_training)
    gradients = reference.fused_batch_norm_grad_grad(spec, empty, stats, stats, empty, empty, stats, stats, stats)
    assert gradients.grad_y_backprop.shape == gradients.grad_x.shape == shape
    assert gradients.grad_scale.tolist() == [0.0] * shape[1]


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize(("shape", "axis"), [((3, 2, 4, 5), 3), ((3, 5, 2, 4), 1)])
def test_channels_are_independent(shape: tuple[int, ...], axis: int, is_training: bool) -> None:
    rng = np.random.default_rng(3)
    tensors = [rng.normal(size=shape) for _ in range(2)]
    stats = [rng.uniform(0.5, 2, size=5) for _ in range(3)]
    whole = reference.fused_batch_norm_grad(Spec(FLOAT32, shape, axis, is_training=is_training), *tensors, *stats)
    for part in (slice(0, 2), slice(2, 5)):
        pieces = [np.moveaxis(np.moveaxis(tensor, axis, 0)[part], 0, axis) for tensor in tensors]
        spec = Spec(FLOAT32, pieces[0].shape, axis, is_training=is_training)
        alone = reference.fused_batch_norm_grad(spec, *pieces, *(vector[part] for vector in stats))
        np.testing.assert_allclose(alone.x_backprop, np.moveaxis(np.moveaxis(whole[0], axis, 0)[part], 0, axis), 1e-12)
        np.testing.assert_allclose(alone.scale_backprop, whole.scale_backprop[part], 1e-12)
        np.testing.assert_allclose(alone.offset_backprop, whole.offset_backprop[part], 1e-12)
