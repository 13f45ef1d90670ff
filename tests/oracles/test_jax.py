"""Batch normalisation of JAX, whose gradients a client computes: `bngrad.jax`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.oracles.conftest import CountedClient

import bngrad
import bngrad.jax

jax.config.update("jax_num_cpu_devices", 2)

FORMATS = {"NHWC": (4, 5, 6, 7), "NCHW": (4, 7, 5, 6), "NDHWC": (2, 3, 4, 5, 7), "NCDHW": (2, 7, 3, 4, 5)}
BY_ALL = (0, 1, 2)


def plain(x: Any, scale: Any, offset: Any, data_format: str, epsilon: float = 1e-5) -> Any:
    """The same forward pass, which JAX differentiates itself."""
    axes = tuple(axis for axis, name in enumerate(data_format) if name != "C")
    shape = [-1 if name == "C" else 1 for name in data_format]
    wide = x.astype(jnp.float32)
    mean, variance = wide.mean(axes, keepdims=True), wide.var(axes, keepdims=True)
    y = (wide - mean) / jnp.sqrt(variance + epsilon) * scale.reshape(shape) + offset.reshape(shape)
    return y.astype(x.dtype)


def arguments(shape: tuple[int, ...], channels: int = 7, mapped: int = 0) -> list[Any]:
    rng = np.random.default_rng(len(shape))
    leading = (mapped,) if mapped else ()
    x = rng.normal(1, 2, (*leading, *shape)).astype(np.float32)
    return [x, *(rng.uniform(0.5, 2, (*leading, channels)).astype(np.float32) for _ in range(2))]


def losses(client: bngrad.Client, data_format: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns a loss by the client and the same by JAX alone."""
    weights = np.random.default_rng(9).normal(size=FORMATS[data_format]).astype(np.float32)

    def ours(x: Any, scale: Any, offset: Any) -> Any:
        y, *_ = bngrad.jax.batch_norm(x, scale, offset, client=client, data_format=data_format)
        return (jnp.sin(y) * weights).sum()

    def theirs(x: Any, scale: Any, offset: Any) -> Any:
        return (jnp.sin(plain(x, scale, offset, data_format)) * weights).sum()

    return ours, theirs


def penalty(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A loss on the gradient by x, as in a gradient penalty."""
    return lambda *args: (jax.grad(loss)(*args) ** 2).sum()


def assert_close(ours: Any, theirs: Any) -> None:
    for our, their in zip(ours, theirs, strict=True):
        assert (our.shape, our.dtype) == (their.shape, their.dtype)
        assert abs(our - their).max() <= 1e-4 * abs(their).max()


@pytest.mark.parametrize("data_format", ["NCHW", "NDHWC"])
def test_both_orders_agree_with_jax(client: bngrad.Client, data_format: str) -> None:
    given = arguments(FORMATS[data_format])
    for change in (lambda loss: loss, penalty):
        ours, theirs = (jax.jit(jax.grad(change(loss), BY_ALL)) for loss in losses(client, data_format))
        assert_close(ours(*given), theirs(*given))


def test_code_that_is_not_compiled_has_the_same_gradients(client: bngrad.Client) -> None:
    given, (ours, _) = arguments(FORMATS["NHWC"]), losses(client, "NHWC")
    assert_close(jax.grad(ours, BY_ALL)(*given), jax.jit(jax.grad(ours, BY_ALL))(*given))


def test_gradients_are_found_while_compilation_is_disabled(client: bngrad.Client) -> None:
    given, (ours, theirs) = arguments(FORMATS["NHWC"]), losses(client, "NHWC")
    with jax.disable_jit():
        assert_close(jax.grad(ours, BY_ALL)(*given), jax.grad(theirs, BY_ALL)(*given))


def test_gradients_that_are_not_compiled_lie_on_the_device_of_their_tensors(client: bngrad.Client) -> None:
    ours, _ = losses(client, "NHWC")
    device = jax.devices()[1]
    found = jax.grad(ours, BY_ALL)(*jax.device_put(arguments(FORMATS["NHWC"]), device))
    assert [each.devices() for each in found] == [{device}] * 3


def test_gradients_that_are_not_compiled_lie_where_the_compiled_ones_do(client: bngrad.Client) -> None:
    x, scale, offset = map(jnp.asarray, arguments(FORMATS["NHWC"]))
    scale = jax.device_put(scale, jax.devices()[1])  # the only one that names its device

    def gradients(x: Any, scale: Any, offset: Any, y_backprop: Any) -> Any:
        _, backward = jax.vjp(lambda *args: bngrad.jax.batch_norm(*args, client=client)[0], x, scale, offset)
        return backward(y_backprop)

    eager, compiled = (call(x, scale, offset, jnp.ones_like(x)) for call in (gradients, jax.jit(gradients)))
    assert [each.devices() for each in eager] == [each.devices() for each in compiled]


def test_a_mapped_dimension_of_length_zero_has_empty_gradients(client: bngrad.Client) -> None:
    _, scale, offset = arguments(FORMATS["NHWC"])
    loss, _ = losses(client, "NHWC")
    mapped = jax.vmap(jax.grad(loss, BY_ALL), (0, None, None))
    empty = jnp.zeros((0, *FORMATS["NHWC"]), jnp.float32)
    assert [each.shape for each in mapped(empty, scale, offset)] == [empty.shape, (0, 7), (0, 7)]


@pytest.mark.parametrize("shape", [(3, 0, 5, 6, 7), (3, 4, 5, 6, 0), (0, 0, 5, 6, 7)])
def test_a_dimension_is_mapped_over_tensors_without_elements(client: bngrad.Client, shape: tuple[int, ...]) -> None:
    def loss(*arguments: Any) -> Any:
        return bngrad.jax.batch_norm(*arguments, client=client)[0].sum()

    channels = shape[-1]
    given = jnp.zeros(shape, jnp.float32), jnp.ones(channels), jnp.zeros(channels)
    for_x, *others = jax.jit(jax.vmap(jax.grad(loss, BY_ALL), (0, None, None)))(*given)
    assert for_x.shape == shape
    for each in others:
        np.testing.assert_array_equal(each, np.zeros((shape[0], channels)))


@pytest.mark.parametrize("data_format", ["NHWC", "NCDHW"])
def test_a_mapped_dimension_is_one_call(counted: CountedClient, data_format: str) -> None:
    given = arguments(FORMATS[data_format], mapped=3)
    ours, theirs = (jax.jit(jax.vmap(jax.grad(loss, BY_ALL), (0, 0, None))) for loss in losses(counted, data_format))
    assert_close(ours(given[0], given[1], given[2][0]), theirs(given[0], given[1], given[2][0]))
    assert counted.sizes == [given[0].size]


def test_any_dimension_is_mapped(client: bngrad.Client) -> None:
    x, scale, offset = arguments(FORMATS["NHWC"], mapped=2)
    given = np.moveaxis(x, 0, 2), scale[0], offset[0]
    ours, theirs = (jax.jit(jax.vmap(jax.grad(loss, BY_ALL), (2, None, None))) for loss in losses(client, "NHWC"))
    assert_close(ours(*given), theirs(*given))


def test_a_dimension_is_mapped_twice_and_in_the_second_order(client: bngrad.Client) -> None:
    x, scale, offset = arguments(FORMATS["NHWC"], mapped=2)

    def twice(loss: Callable[..., Any]) -> Any:
        function = jax.grad(penalty(loss), BY_ALL)
        return jax.jit(jax.vmap(jax.vmap(function, (0, None, None)), (None, 0, None)))

    ours, theirs = (twice(loss)(x, scale, offset[0]) for loss in losses(client, "NHWC"))
    assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16], ids=["float16", "bfloat16"])
def test_short_dtypes_keep_their_dtype(client: bngrad.Client, dtype: Any) -> None:
    x, scale, offset = arguments(FORMATS["NHWC"])
    x = jnp.asarray(x, dtype)
    weights = jnp.asarray(np.random.default_rng(1).normal(size=x.shape), jnp.float32)
    y, mean, variance = jax.jit(lambda x: bngrad.jax.batch_norm(x, scale, offset, client=client))(x)
    assert (y.dtype, mean.dtype, variance.shape) == (dtype, jnp.float32, (7,))
    ours, theirs = (
        jax.jit(jax.grad(lambda x, call=call: (call(x).astype(jnp.float32) * weights).sum()))(x)
        for call in (
            lambda x: bngrad.jax.batch_norm(x, scale, offset, client=client)[0],
            lambda x: plain(x, scale, offset, "NHWC"),
        )
    )
    assert ours.dtype == dtype
    assert abs(ours.astype(jnp.float32) - theirs.astype(jnp.float32)).max() < 0.02


def test_many_compiled_steps_end_with_the_same_values(client: bngrad.Client) -> None:
    """A callback that converts its arguments by JAX may wait for the thread that it runs in."""
    x, scale, offset = map(jnp.asarray, arguments((8, 56, 56, 64), 64))

    def trained(normalize: Callable[..., Any]) -> Any:
        gradient = jax.grad(lambda x: jnp.sin(normalize(x, scale, offset)).sum())
        step = jax.jit(lambda x: x - gradient(x))
        end = x
        for _ in range(10):
            end = step(end)
        return end

    ours = trained(lambda *args: bngrad.jax.batch_norm(*args, client=client)[0])
    theirs = trained(lambda x, scale, offset: plain(x, scale, offset, "NHWC"))
    assert abs(ours - theirs).max() < 1e-3 * abs(ours - x).max()


def test_more_calls_at_a_time_than_cpus_end() -> None:
    """XLA has a thread for each CPU, and each call holds one."""
    cpu = str(min(os.sched_getaffinity(0)))
    command = ["taskset", "-c", cpu, sys.executable, "-m", "tests.oracles.jax_steps", "2", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_replicated_tensors_and_meshes_that_are_set_have_gradients(client: bngrad.Client) -> None:
    given, (ours, _) = arguments(FORMATS["NHWC"]), losses(client, "NHWC")
    expected = jax.jit(jax.grad(ours, BY_ALL))(*given)
    mesh = jax.make_mesh((2,), ("batch",))
    replicated = jax.device_put(given, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    assert_close(jax.jit(jax.grad(ours, BY_ALL))(*replicated), expected)
    set_mesh = jax.set_mesh if hasattr(jax, "set_mesh") else jax.sharding.use_mesh
    with set_mesh(mesh):
        assert_close(jax.jit(jax.grad(ours, BY_ALL))(*given), expected)
        assert_close(jax.grad(ours, BY_ALL)(*replicated), expected)


def test_the_third_order_is_refused(client: bngrad.Client) -> None:
    ours, _ = losses(client, "NHWC")
    with pytest.raises(NotImplementedError, match="the client has no gradients of the third order"):
        jax.grad(penalty(penalty(ours)))(*arguments(FORMATS["NHWC"]))


def test_sharded_tensors_are_refused_but_for_shards_that_are_mapped(client: bngrad.Client) -> None:
    x, scale, offset = arguments(FORMATS["NHWC"])
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("batch",))
    spec = jax.sharding.PartitionSpec("batch")
    sharded = jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))

    def normalize(x: Any) -> Any:
        return bngrad.jax.batch_norm(x, scale, offset, client=client)[0]

    for call, error in ((normalize, ValueError), (jax.jit(normalize), jax.errors.JaxRuntimeError)):
        with pytest.raises(error, match=r"x must be on one device, not sharded over 2: .*\(\.\.\., check_vma=False\)"):
            call(sharded)
    by_shard = jax.shard_map(normalize, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    gradient = jax.jit(jax.grad(lambda x: jnp.sin(by_shard(x)).sum()))(sharded)
    halves = [jax.grad(lambda x: jnp.sin(normalize(x)).sum())(half) for half in np.split(x, 2)]
    np.testing.assert_allclose(gradient, np.concatenate(halves), atol=1e-5)


def test_errors_name_the_argument(client: bngrad.Client) -> None:
    x, scale, offset = arguments(FORMATS["NHWC"])
    target: Any = "localhost:50051"
    with pytest.raises(TypeError, match=r"client must be a bngrad.Client, not 'localhost:50051'"):
        bngrad.jax.batch_norm(x, scale, offset, client=target)
    with pytest.raises(ValueError, match="x must be 5-dimensional for data_format NDHWC"):
        bngrad.jax.batch_norm(x, scale, offset, client=client, data_format="NDHWC")
    with pytest.raises(ValueError, match="data_format must be one of NHWC, NCHW, NDHWC, NCDHW, not 'NWHC'"):
        bngrad.jax.batch_norm(x, scale, offset, client=client, data_format="NWHC")  # type: ignore[arg-type]
    for position, name in enumerate(("x", "scale", "offset")):
        given = [x, scale, offset]
        given[position] = given[position].astype(np.int32)
        with pytest.raises(TypeError, match=f"{name} must have dtype .*float32, not int32"):
            bngrad.jax.batch_norm(*given, client=client)
        given[position] = [1.0]
        with pytest.raises(TypeError, match=f"{name} must be an array of JAX or NumPy, not list"):
            bngrad.jax.batch_norm(*given, client=client)
    for wrong in (scale[:1], scale[None]):
        with pytest.raises(ValueError, match=r"scale must have shape \(7,\), as x has 7 channels, not \(1,"):
            bngrad.jax.batch_norm(x, wrong, offset, client=client)
        with pytest.raises(ValueError, match=r"offset must have shape \(7,\), as x has 7 channels, not \(1,"):
            bngrad.jax.batch_norm(x, scale, wrong, client=client)
    with bngrad.Client("localhost:1") as closed:
        pass
    gradient = jax.grad(lambda x: bngrad.jax.batch_norm(x, scale, offset, client=closed)[0].sum())
    with pytest.raises(bngrad.ClientClosedError, match="is closed"):
        gradient(x)
    with pytest.raises(jax.errors.JaxRuntimeError, match="is closed"):
        jax.block_until_ready(jax.jit(gradient)(x))
