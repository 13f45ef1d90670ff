from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bngrad_kernels.spec import BFLOAT16, FLOAT16, FLOAT32, InvalidArgumentError, ReserveSpace2Kind, Spec, TensorHeader
from bngrad_kernels.validation import (
    batch_norm_training_backprop_spec,
    fused_batch_norm_grad_grad_spec,
    fused_batch_norm_grad_v2_spec,
    fused_batch_norm_grad_v3_spec,
)

FLOAT64 = np.dtype(np.float64)


def header(shape: tuple[int, ...], dtype: np.dtype[Any] = FLOAT32, nbytes: int | None = None) -> TensorHeader:
    return TensorHeader(dtype, shape, math.prod(shape) * dtype.itemsize if nbytes is None else nbytes)


def v3_spec(**changes: Any) -> Spec:
    tensor, stats = header((2, 5, 6, 3)), header((3,))
    arguments = {
        **dict.fromkeys(("y_backprop", "x"), tensor),
        **dict.fromkeys(("scale", "reserve_space_1", "reserve_space_2"), stats),
        "reserve_space_3": header((0,)),
    }
    return fused_batch_norm_grad_v3_spec(**arguments | changes)


def onednn_spec(**changes: Any) -> Spec:
    tensor, stats = header((2, 5, 3)), header((3,))
    arguments: dict[str, Any] = {
        **dict.fromkeys(("input_forward", "output_delta"), tensor),
        **dict.fromkeys(("mean", "variance", "gamma"), stats),
        "epsilon": 1e-3,
    }
    return batch_norm_training_backprop_spec(**arguments | changes)


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16, FLOAT32])
@pytest.mark.parametrize(
    ("data_format", "shape", "axis", "outer", "inner"),
    [
        ("NHWC", (2, 5, 6, 3), 3, 60, 1),
        ("NCHW", (2, 3, 5, 6), 1, 2, 30),
        ("NDHWC", (2, 4, 5, 6, 3), 4, 240, 1),
        ("NCDHW", (2, 3, 4, 5, 6), 1, 2, 120),
    ],
)
def test_every_v3_format_and_dtype_is_accepted(
    dtype: np.dtype[Any], data_format: str, shape: tuple[int, ...], axis: int, outer: int, inner: int
) -> None:
    tensor = header(shape, dtype)
    spec = v3_spec(x=tensor, y_backprop=tensor, data_format=data_format)
    assert spec == Spec(dtype, shape, axis)
    assert (spec.outer, spec.channels, spec.inner) == (outer, 3, inner)
    assert spec.elements_per_channel == outer * inner


@pytest.mark.parametrize("data_format", ["NXC", "NCX"])
@pytest.mark.parametrize("spatial", [(), (4,), (4, 5), (4, 5, 6)])
def test_onednn_takes_zero_to_three_spatial_dimensions(data_format: str, spatial: tuple[int, ...]) -> None:
    shape = (2, *spatial, 3) if data_format == "NXC" else (2, 3, *spatial)
    spec = onednn_spec(input_forward=header(shape), output_delta=header(shape), data_format=data_format)
    assert spec.channels == 3
    assert spec.elements_per_channel == 2 * math.prod(spatial)
    assert spec.is_training


def test_defaults_are_the_ops_own() -> None:
    assert v3_spec().epsilon == np.float32(1e-4)
    assert v3_spec().is_training
    assert v3_spec().reserve_space_2_kind is ReserveSpace2Kind.VARIANCE
    assert onednn_spec().reserve_space_2_kind is ReserveSpace2Kind.VARIANCE


def test_bfloat16_statistics_go_with_a_bfloat16_input() -> None:
    tensor, stats = header((2, 3), BFLOAT16), header((3,), BFLOAT16)
    spec = onednn_spec(input_forward=tensor, output_delta=tensor, mean=stats, variance=stats, gamma=None)
    assert spec.stats_dtype == BFLOAT16


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        ({"x": header((2, 5, 6, 4)), "scale": header((4,)), "reserve_space_1": header((4,)),
          "reserve_space_2": header((4,))}, "y_backprop",
         "x and y_backprop must have same shape, but x has shape (2, 5, 6, 4) and y_backprop has shape (2, 5, 6, 3)"),
        ({"scale": header((4,))}, "scale",
         "scale must have the same number of elements as the channels of x, got 4 and 3"),
        ({"scale": header((1,))}, "scale",
         "scale must have the same number of elements as the channels of x, got 1 and 3"),
        ({"reserve_space_1": header((2,))}, "reserve_space_1",
         "reserve_space_1 must have the same number of elements as the channels of x, got 2 and 3"),
        ({"reserve_space_2": header((2,))}, "reserve_space_2",
         "reserve_space_2 must have the same number of elements as the channels of x, got 2 and 3"),
        ({"reserve_space_2": header((3, 1))}, "reserve_space_2", "reserve_space_2 must be 1-dimensional, not (3, 1)"),
        ({"reserve_space_1": header((3,), BFLOAT16)}, "reserve_space_1",
         "reserve_space_1 must have dtype float32, not bfloat16"),
        ({"reserve_space_3": header((7, 7), FLOAT16)}, "reserve_space_3",
         "reserve_space_3 must have dtype float32, not float16"),
        ({"y_backprop": header((2, 5, 6, 3), FLOAT16)}, "y_backprop",
         "y_backprop must have dtype float32, not float16"),
        ({"x": header((2, 5, 6, 3), nbytes=719)}, "x",
         "x must have 720 bytes of data for shape (2, 5, 6, 3) and dtype float32, not 719"),
        ({"reserve_space_3": header((7, 7), nbytes=3)}, "reserve_space_3",
         "reserve_space_3 must have 196 bytes of data for shape (7, 7) and dtype float32, not 3"),
        ({"data_format": "nhwc"}, "data_format",
         "data_format must be one of NHWC, NCHW, NDHWC, NCDHW, not 'nhwc'"),
        ({"data_format": "NXC"}, "data_format", "data_format must be one of NHWC, NCHW, NDHWC, NCDHW, not 'NXC'"),
        ({"data_format": "NDHWC"}, "x", "x must be 5-dimensional for data_format NDHWC, not (2, 5, 6, 3)"),
        ({"epsilon": -1e-4}, "epsilon", "epsilon must be finite and not negative in float32, not -0.0001"),
        ({"epsilon": math.nan}, "epsilon", "epsilon must be finite and not negative in float32, not nan"),
        ({"epsilon": 1e39}, "epsilon", "epsilon must be finite and not negative in float32, not 1e+39"),
    ],
)  # fmt: skip
def test_bad_v3_input_is_refused_by_field_in_tensorflows_words(
    changes: dict[str, Any], field: str, message: str
) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        v3_spec(**changes)
    assert (field, message) in [(violation.field, violation.description) for violation in refused.value.violations]
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epsilon": 0.0}, "epsilon must be finite and positive in float32, not 0.0"),
        ({"epsilon": 1e-60}, "epsilon must be finite and positive in float32, not 1e-60"),
        ({"data_format": "NHWC"}, "data_format must be one of NXC, NCX, not 'NHWC'"),
        ({"mean": header((3,), BFLOAT16)}, "mean must have dtype float32, not bfloat16"),
        ({"mean": header((3,), FLOAT16), "variance": header((3,), FLOAT16)},
         "mean must have dtype float32, not float16; variance must have dtype float32, not float16"),
        ({"gamma": header((3,), BFLOAT16)}, "gamma must have dtype float32, not bfloat16"),
        ({"variance": header((4,))},
         "variance must have the same number of elements as the channels of input_forward, got 4 and 3"),
        ({"input_forward": header((2, 5, 3), FLOAT64)},
         "input_forward must have dtype float16 or bfloat16 or float32, not float64"),
        ({"output_delta": header((2, 3, 5))}, "input_forward and output_delta must have same shape,"),
    ],
)  # fmt: skip
def test_bad_onednn_input_is_refused_by_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        onednn_spec(**changes)
    assert message in str(refused.value)


def test_v2_has_no_five_dimensional_format() -> None:
    tensor, stats = header((1, 2, 2, 2, 3)), header((3,))
    with pytest.raises(InvalidArgumentError, match="data_format must be one of NHWC, NCHW, not 'NDHWC'"):
        fused_batch_norm_grad_v2_spec(tensor, tensor, stats, stats, stats, data_format="NDHWC")


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, -5, 6, 3), "x must have no negative dimension"),
        ((2**40, 2**40, 1, 3), "x must have fewer than 2\\*\\*63 bytes"),
        ((0, 2**40, 2**40, 3), "x must have fewer than 2\\*\\*63 bytes"),
    ],
)
def test_impossible_shapes_are_refused(shape: tuple[int, ...], message: str) -> None:
    tensor = header(shape, nbytes=0)
    with pytest.raises(InvalidArgumentError, match=message):
        v3_spec(x=tensor, y_backprop=tensor)


def test_everything_wrong_is_named_at_once() -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        v3_spec(scale=header((2,)), reserve_space_1=header((3,), FLOAT16), epsilon=-1.0)
    assert [violation.field for violation in refused.value.violations] == ["scale", "reserve_space_1", "epsilon"]


@given(
    shape=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=6).map(tuple),
    stats_shape=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=2).map(tuple),
    dtype=st.sampled_from([FLOAT16, BFLOAT16, FLOAT32]),
    nbytes=st.integers(0, 2**40),
    data_format=st.sampled_from(["NHWC", "NCHW", "NDHWC", "NCDHW"]) | st.text(),
    epsilon=st.floats(),
)
def test_any_header_is_accepted_or_refused_but_never_fails_otherwise(
    shape: tuple[int, ...],
    stats_shape: tuple[int, ...],
    dtype: np.dtype[Any],
    nbytes: int,
    data_format: str,
    epsilon: float,
) -> None:
    tensor, stats = TensorHeader(dtype, shape, nbytes), TensorHeader(FLOAT32, stats_shape, nbytes)
    try:
        spec = fused_batch_norm_grad_v3_spec(
            tensor, tensor, stats, stats, stats, None, data_format=data_format, epsilon=epsilon
        )
    except InvalidArgumentError:
        return
    assert spec.tensor_nbytes == nbytes


GRAD_GRAD: dict[str, Any] = {
    **dict.fromkeys(("grad_x_backprop", "y_backprop", "x"), header((2, 5, 6, 3))),
    **dict.fromkeys(
        ("grad_scale_backprop", "grad_offset_backprop", "scale", "reserve_space_1", "reserve_space_2"), header((3,))
    ),
}


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16, FLOAT32])
@pytest.mark.parametrize(
    ("data_format", "shape", "axis"),
    [
        ("NHWC", (2, 5, 6, 3), 3),
        ("NCHW", (2, 3, 5, 6), 1),
        ("NDHWC", (2, 4, 5, 6, 3), 4),
        ("NCDHW", (2, 3, 4, 5, 6), 1),
    ],
)
def test_the_second_order_takes_every_v3_format_and_dtype(
    dtype: np.dtype[Any], data_format: str, shape: tuple[int, ...], axis: int
) -> None:
    tensors = dict.fromkeys(("grad_x_backprop", "y_backprop", "x"), header(shape, dtype))
    spec = fused_batch_norm_grad_grad_spec(**GRAD_GRAD | tensors, data_format=data_format, is_training=False)
    assert spec == Spec(dtype, shape, axis, is_training=False, order=2)


@pytest.mark.parametrize(
    ("field", "changed", "message"),
    [
        ("grad_x_backprop", header((2, 5, 3, 6)), "x and grad_x_backprop must have same shape, but x has shape"),
        ("grad_x_backprop", header((2, 5, 6, 3), FLOAT16), "grad_x_backprop must have dtype float32, not float16"),
        ("grad_x_backprop", header((2, 5, 6, 3), nbytes=8), "grad_x_backprop must have 720 bytes of data"),
        ("y_backprop", header((2, 5, 3, 6)), "x and y_backprop must have same shape, but x has shape"),
        ("grad_scale_backprop", header((1,)), "grad_scale_backprop must have the same number of elements as the"),
        ("grad_scale_backprop", header((3,), FLOAT16), "grad_scale_backprop must have dtype float32, not float16"),
        ("grad_offset_backprop", header((3, 1)), "grad_offset_backprop must be 1-dimensional, not (3, 1)"),
        ("scale", header((4,)), "scale must have the same number of elements as the channels of x, got 4 and 3"),
    ],
)
def test_the_second_order_refuses_by_the_name_of_the_field(field: str, changed: TensorHeader, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        fused_batch_norm_grad_grad_spec(**GRAD_GRAD | {field: changed})
    (violation,) = caught.value.violations
    assert violation.field == field
    assert violation.description.startswith(message)


@pytest.mark.parametrize(
    ("attribute", "value"), [("epsilon", math.nan), ("epsilon", -1.0), ("data_format", "NXC"), ("data_format", "nhwc")]
)
def test_the_second_order_refuses_attributes_that_are_not_the_ops(attribute: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        fused_batch_norm_grad_grad_spec(**GRAD_GRAD, **{attribute: value})
    assert [violation.field for violation in caught.value.violations] == [attribute]
