"""Conversion of arguments to messages, and of messages to results, without a connection."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.lib.stride_tricks import as_strided

import bngrad
from bngrad._requests import codec, ops
from bngrad._requests.attributes import OneDnnAttributes, TensorFlowAttributes
from bngrad._requests.request import OpSchema, PreparedRequest
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
X = np.arange(120, dtype=np.float32).reshape(2, 3, 4, 5)
STATS = np.arange(5, dtype=np.float32)
EMPTY = pb.Tensor(dtype=pb.DATA_TYPE_FLOAT32, shape=[0])


def tensorflow_attributes(
    epsilon: Any = 1e-4,
    data_format: Any = "NHWC",
    is_training: Any = True,
    reserve_space_2_kind: Any = "variance",
    priority: Any = 0,
) -> TensorFlowAttributes:
    return TensorFlowAttributes(epsilon, data_format, is_training, reserve_space_2_kind, priority)


def v3(x: Any = X, rs3: Any = None, out: Any = None, **attributes: Any) -> PreparedRequest[bngrad.FusedBatchNormGradV3]:
    return ops.V3.prepare((X, x, STATS, STATS, STATS, rs3), tensorflow_attributes(**attributes), out)


def v2(tensors: Any, out: Any = None, **attributes: Any) -> PreparedRequest[bngrad.FusedBatchNormGradV2]:
    return ops.V2.prepare(tensors, tensorflow_attributes(**attributes), out)


def onednn(
    tensors: Any, epsilon: Any = 1e-4, data_format: Any = "NXC", variance_kind: Any = "variance", priority: Any = 0
) -> PreparedRequest[bngrad.BatchNormTrainingBackprop]:
    attributes = OneDnnAttributes(epsilon, data_format, variance_kind, priority)
    return ops.TRAINING_BACKPROP.prepare(tensors, attributes, None)


def message(request: PreparedRequest[Any]) -> bytes:
    return b"".join(request.pieces())


def v3_message(**arguments: Any) -> pb.FusedBatchNormGradV3Request:
    return pb.FusedBatchNormGradV3Request.FromString(message(v3(**arguments)))


def tensor(array: Any, data_type: pb.DataType = pb.DATA_TYPE_FLOAT32) -> pb.Tensor:
    return pb.Tensor(dtype=data_type, shape=array.shape, data=array.tobytes())


def answer_v3(**changes: pb.Tensor | None) -> bytes:
    tensors: dict[str, pb.Tensor | None] = {
        "x_backprop": tensor(X),
        "scale_backprop": tensor(STATS),
        "offset_backprop": tensor(STATS + 1),
        "reserve_space_4": EMPTY,
        "reserve_space_5": EMPTY,
    }
    return pb.FusedBatchNormGradV3Response(**tensors | changes).SerializeToString()


def test_the_v3_request_holds_every_argument() -> None:
    request = v3(X + 1, epsilon=0.5, data_format="NCHW", is_training=False, reserve_space_2_kind="inverse_std")
    assert request.op.method == "/bngrad.v1.BatchNormGradService/FusedBatchNormGradV3"
    assert pb.FusedBatchNormGradV3Request.FromString(message(request)) == pb.FusedBatchNormGradV3Request(
        y_backprop=tensor(X),
        x=tensor(X + 1),
        scale=tensor(STATS),
        reserve_space_1=tensor(STATS),
        reserve_space_2=tensor(STATS),
        epsilon=0.5,
        data_format="NCHW",
        is_training=False,
        reserve_space_2_kind=pb.RESERVE_SPACE2_KIND_INVERSE_STD,
    )


def test_the_v2_request_holds_every_argument() -> None:
    request = v2((X, X, STATS, STATS + 1, STATS + 2), epsilon=0.5)
    assert request.op.method == "/bngrad.v1.BatchNormGradService/FusedBatchNormGradV2"
    assert pb.FusedBatchNormGradV2Request.FromString(message(request)) == pb.FusedBatchNormGradV2Request(
        y_backprop=tensor(X),
        x=tensor(X),
        scale=tensor(STATS),
        reserve_space_1=tensor(STATS + 1),
        reserve_space_2=tensor(STATS + 2),
        epsilon=0.5,
        data_format="NHWC",
        is_training=True,
        reserve_space_2_kind=pb.RESERVE_SPACE2_KIND_VARIANCE,
    )


@pytest.mark.parametrize("gamma", [None, STATS + 2])
def test_the_onednn_request_holds_every_argument(gamma: Any) -> None:
    request = onednn((X, X + 1, STATS, STATS + 1, gamma), 0.5, "NCX", "inverse_std")
    assert request.op.method == "/bngrad.v1.BatchNormGradService/BatchNormTrainingBackprop"
    assert pb.BatchNormTrainingBackpropRequest.FromString(message(request)) == pb.BatchNormTrainingBackpropRequest(
        input_forward=tensor(X),
        output_delta=tensor(X + 1),
        mean=tensor(STATS),
        variance=tensor(STATS + 1),
        gamma=None if gamma is None else tensor(gamma),
        epsilon=0.5,
        data_format="NCX",
        variance_kind=pb.RESERVE_SPACE2_KIND_INVERSE_STD,
    )


def test_reserve_space_3_is_sent_without_its_elements() -> None:
    sent = v3_message(rs3=np.ones((7, 2), np.float32)).reserve_space_3
    assert sent == pb.Tensor(dtype=pb.DATA_TYPE_FLOAT32, shape=[7, 2])
    assert not v3_message(rs3=None).HasField("reserve_space_3")


@pytest.mark.parametrize(
    ("dtype", "data_type"),
    [("f2", pb.DATA_TYPE_FLOAT16), (BFLOAT16, pb.DATA_TYPE_BFLOAT16), ("f4", pb.DATA_TYPE_FLOAT32)],
)
@pytest.mark.parametrize(
    "change",
    [
        np.asarray,
        np.asfortranarray,
        lambda array: np.repeat(array, 2, axis=0)[::2],
        lambda array: array[..., ::-1].copy()[..., ::-1],
        lambda array: array if array.dtype == BFLOAT16 else array.astype(array.dtype.newbyteorder(">")),
    ],
    ids=["c", "fortran", "strided", "negative-strides", "big-endian"],
)
def test_elements_travel_little_endian_in_c_order(
    dtype: Any, data_type: pb.DataType, change: Callable[[Any], Any]
) -> None:
    array = X.astype(dtype)
    assert v3_message(x=change(array)).x == tensor(array, data_type)


@pytest.mark.parametrize("shape", [(), (0, 3, 4, 5), (2, 0, 0, 0)])
def test_scalars_and_empty_tensors_keep_their_shape(shape: tuple[int, ...]) -> None:
    array = np.zeros(shape, np.float32)
    assert v3_message(x=array).x == tensor(array)


def test_dtypes_that_the_protocol_does_not_have_are_refused_field_by_field() -> None:
    tensors = X.astype(np.float64), X.astype(int), STATS.astype(complex), STATS, STATS, STATS > 1
    with pytest.raises(bngrad.InvalidArgumentError) as refused:
        ops.V3.prepare(tensors, tensorflow_attributes(), None)
    assert refused.value.violations == (
        bngrad.FieldViolation("y_backprop", "y_backprop must have dtype float16, bfloat16 or float32, not float64"),
        bngrad.FieldViolation("x", "x must have dtype float16, bfloat16 or float32, not int64"),
        bngrad.FieldViolation("scale", "scale must have dtype float32, not complex128"),
        bngrad.FieldViolation("reserve_space_3", "reserve_space_3 must have dtype float32, not bool"),
    )
    assert str(refused.value).startswith("y_backprop must have dtype")


@pytest.mark.parametrize("field", ["y_backprop", "x", "scale", "reserve_space_1", "reserve_space_2"])
def test_none_is_refused_for_a_required_tensor(field: str) -> None:
    tensors: dict[str, Any] = {"y_backprop": X, "x": X, "scale": STATS, "reserve_space_1": STATS}
    tensors |= {"reserve_space_2": STATS, field: None}
    with pytest.raises(bngrad.InvalidArgumentError, match=rf"^{field} must be an array, not None$"):
        v2(tuple(tensors.values()))


def test_a_request_too_large_for_a_message_is_refused_before_it_is_copied() -> None:
    gibibyte = np.empty((2**14, 2**7, 2**7, 1), np.float32)  # untouched pages take no memory
    request = onednn((gibibyte, gibibyte, STATS, STATS, None))
    with pytest.raises(bngrad.InvalidArgumentError, match="at most 2147483647 bytes as one message, not 2147483") as no:
        request.pieces()
    assert [violation.field for violation in no.value.violations] == ["input_forward"]
    assert sum(map(len, request.header_pieces())) < 1000


@pytest.mark.parametrize(
    "view",
    [
        np.broadcast_to(np.float32(1), (2**50, 1, 1, 5)),
        as_strided(STATS, (2**50, 1, 1, 5), (0, 0, 0, 4)),
        torch.ones(1).expand(2**50, 1, 1, 5),
    ],
    ids=["broadcast", "strided", "expanded"],
)
def test_a_view_that_is_too_large_to_be_copied_is_named(view: Any) -> None:
    shape = re.escape(str((2**50, 1, 1, 5)))
    problem = f"must fit into memory in C order, but shape {shape} of float32 has {5 * 2**52} bytes"
    with pytest.raises(MemoryError, match=f"^x {problem}$"):
        v3(view)


def test_the_header_of_an_exchange_is_the_request_without_the_elements_of_the_large_tensors() -> None:
    request = v3(X + 1, rs3=STATS)
    expected = pb.FusedBatchNormGradV3Request.FromString(message(request))
    expected.y_backprop.ClearField("data")
    expected.x.ClearField("data")
    assert pb.FusedBatchNormGradV3Request.FromString(b"".join(request.header_pieces())) == expected
    assert list(request.large) == ["y_backprop", "x"]
    assert (request.nbytes, request.dtype, request.shape) == (X.nbytes, X.dtype, X.shape)


@pytest.mark.parametrize("nbytes", [16 * 1024, 16 * 1024 + 4])
def test_large_arrays_in_the_layout_of_the_protocol_are_not_copied(nbytes: int) -> None:
    x = np.zeros((1, 1, 1, nbytes // 4), np.float32)
    request = v3(x)
    assert np.shares_memory(request.large["x"], x)
    sent = [np.frombuffer(each, np.uint8) for each in request.pieces()]
    assert any(np.shares_memory(each, x) for each in sent) == (nbytes > 16 * 1024)


@pytest.mark.parametrize(
    ("op", "data_format", "sent", "shape"),
    [
        (ops.V3, "NCHW", "NHWC", (2, 5, 3, 4)),
        (ops.V3, "NCDHW", "NDHWC", (2, 5, 3, 4, 2)),
        (ops.V2, "NCHW", "NHWC", (2, 5, 3, 4)),
        (ops.GRAD_GRAD, "NCHW", "NHWC", (2, 5, 3, 4)),
        (ops.TRAINING_BACKPROP, "NCX", "NXC", (2, 5, 3)),
        (ops.TRAINING_BACKPROP, "NCX", "NXC", (2, 5, 3, 4)),
    ],
)
def test_tensors_whose_memory_has_the_channels_last_are_sent_as_they_lie(
    op: OpSchema[Any], data_format: Any, sent: str, shape: tuple[int, ...]
) -> None:
    memory = np.arange(math.prod(shape), dtype=np.float32).reshape(shape[0], *shape[2:], shape[1])
    x, out = np.moveaxis(memory, -1, 1), np.empty(shape, np.float32)
    tensors: list[Any] = [x if field in op.large else STATS for field in op.tensors if field != "reserve_space_3"]
    attributes: Any = tensorflow_attributes(data_format=data_format)
    if op is ops.V3:
        tensors.append(None)
    if op is ops.TRAINING_BACKPROP:
        attributes = OneDnnAttributes(1e-4, data_format, "variance", 0)
    request = op.prepare(tensors, attributes, (out, None) if op is ops.GRAD_GRAD else out)
    assert all(each is not x and np.shares_memory(each, memory) for each in request.large.values())
    assert request.shape == memory.shape
    assert sent.encode() in request.rest
    assert request.out[0] is not None
    assert (request.out[0].shape, np.shares_memory(request.out[0], out)) == (memory.shape, True)


def test_results_have_the_channels_where_the_caller_has_them() -> None:
    x = np.moveaxis(X + 1, -1, 1)
    tensors = np.moveaxis(X, -1, 1), x, STATS, STATS, STATS
    small = {"scale_backprop": tensor(STATS), "offset_backprop": tensor(STATS)}
    empty = {"reserve_space_3": EMPTY, "reserve_space_4": EMPTY}
    answer = pb.FusedBatchNormGradV2Response(x_backprop=tensor(X), **small, **empty).SerializeToString()
    result = v2(tensors, data_format="NCHW").read(answer)
    np.testing.assert_array_equal(result.x_backprop, tensors[0])
    out = np.empty(x.shape, np.float32)
    request = v2(tensors, out, data_format="NCHW")
    assert request.read(answer, request.out).x_backprop is out
    np.testing.assert_array_equal(out, tensors[0])
    with pytest.raises(bngrad.InvalidArgumentError, match=r"^out must have shape \(2, 5, 3, 4\) of float32, not"):
        v2(tensors, np.empty(X.shape, np.float32), data_format="NCHW")


@pytest.mark.parametrize(
    ("y_backprop", "x", "data_format"),
    [
        (np.moveaxis(X, -1, 1), np.ascontiguousarray(np.moveaxis(X, -1, 1)), "NCHW"),
        (np.moveaxis(X, -1, 1)[:, ::2], np.moveaxis(X, -1, 1)[:, ::2], "NCHW"),
        (np.moveaxis(X, -1, 1), np.moveaxis(X[:1], -1, 1), "NCHW"),
        (X.transpose(), X.transpose(), "NHWC"),
        (X[0].transpose(), X[0].transpose(), "NCHW"),
    ],
    ids=["mixed", "strided", "shapes", "other format", "rank"],
)
def test_tensors_in_any_other_memory_layout_keep_their_data_format(y_backprop: Any, x: Any, data_format: str) -> None:
    request = v2((y_backprop, x, STATS, STATS, STATS), data_format=data_format)
    assert data_format.encode() in request.rest
    assert request.large["x"].shape == x.shape


@pytest.mark.parametrize(
    "make",
    [
        np.empty_like,
        lambda like: np.empty((*like.shape[:-1], 10), like.dtype)[..., ::2],
        lambda like: np.empty(like.shape[::-1], like.dtype).T[::-1, :, ::-1],
        lambda like: np.empty((9, 9, 9, 9), like.dtype)[tuple(slice(length) for length in like.shape)],
    ],
)
def test_out_may_be_any_writeable_array_of_the_dtype_and_shape_of_x(make: Callable[[Any], Any]) -> None:
    out = make(X)
    request = v3(out=out)
    assert request.out[0] is out
    assert message(request) == message(v3())


@pytest.mark.parametrize(
    ("out", "complaint"),
    [
        (np.empty_like(X, np.float64), r"have shape \(2, 3, 4, 5\) of float32, not \(2, 3, 4, 5\) of float64"),
        (np.empty_like(X, ">f4"), r"have shape \(2, 3, 4, 5\) of float32, not \(2, 3, 4, 5\) of >f4"),
        (np.empty(120, np.float32), r"have shape \(2, 3, 4, 5\) of float32, not \(120,\) of float32"),
        (np.broadcast_to(np.float32(0), X.shape), "be writeable"),
        (X, "not overlap y_backprop"),
        (X.reshape(-1)[::-1].reshape(X.shape), "not overlap y_backprop"),
        (torch.zeros(5).expand(X.shape), r"have memory of its own for each element .*, not strides \(0, 0, 0, 4\)"),
        (as_strided(np.zeros(999, np.float32), X.shape, (240, 80, 16, 4)), "have memory of its own for each element"),
    ],
    ids=["dtype", "byte-order", "shape", "read-only", "same", "reversed", "expanded", "sliding"],
)
def test_an_out_that_cannot_take_the_gradient_is_refused(out: Any, complaint: str) -> None:
    with pytest.raises(bngrad.InvalidArgumentError, match=f"^out must {complaint}") as refused:
        v3(X + 1, out=out)
    assert [violation.field for violation in refused.value.violations] == ["out"]


def test_an_out_over_x_alone_is_refused_too() -> None:
    x = X + 1
    with pytest.raises(bngrad.InvalidArgumentError, match=r"^out must not overlap x$"):
        v3(x, out=x)


def test_an_out_over_a_small_argument_is_refused_too() -> None:
    out = np.empty_like(X)
    with pytest.raises(bngrad.InvalidArgumentError, match=r"^out must not overlap scale$"):
        v2((X, X + 1, out.reshape(-1)[: STATS.size], STATS, STATS), out)


def grad_grad(out: Any = None, priority: int = 0) -> PreparedRequest[bngrad.FusedBatchNormGradGrad]:
    tensors = X, STATS, STATS + 1, X + 1, X + 2, STATS + 2, STATS + 3, STATS + 4
    attributes = TensorFlowAttributes(0.5, "NHWC", False, "inverse_std", priority)
    return ops.GRAD_GRAD.prepare(tensors, attributes, out)


def test_the_second_order_request_holds_every_argument() -> None:
    request = grad_grad(priority=-3)
    assert pb.FusedBatchNormGradGradRequest.FromString(message(request)) == pb.FusedBatchNormGradGradRequest(
        grad_x_backprop=tensor(X),
        grad_scale_backprop=tensor(STATS),
        grad_offset_backprop=tensor(STATS + 1),
        y_backprop=tensor(X + 1),
        x=tensor(X + 2),
        scale=tensor(STATS + 2),
        reserve_space_1=tensor(STATS + 3),
        reserve_space_2=tensor(STATS + 4),
        epsilon=0.5,
        data_format="NHWC",
        is_training=False,
        reserve_space_2_kind=pb.RESERVE_SPACE2_KIND_INVERSE_STD,
        priority=-3,
    )
    assert list(request.large) == ["grad_x_backprop", "y_backprop", "x"]
    assert request.out == (None, None)


def test_the_second_order_puts_two_outputs_where_the_caller_wants_them() -> None:
    first, second = np.empty_like(X), np.empty_like(X)
    pairs: list[Any] = [(first, second), [None, second], (first, None)]
    for pair in pairs:
        assert all(ours is theirs for ours, theirs in zip(grad_grad(out=pair).out, pair, strict=True))
    for out, complaint in [
        ((first, first), r"^out\[1\] must not overlap out\[0\]$"),
        ((first[:1], second), r"^out\[0\] must have shape"),
        ((None, X), r"^out\[1\] must not overlap grad_x_backprop$"),
    ]:
        with pytest.raises(bngrad.InvalidArgumentError, match=complaint):
            grad_grad(out=out)


@pytest.mark.parametrize("out", [np.empty_like(X), (X,), (None, None, None), 1])
def test_an_out_of_the_second_order_that_is_no_pair_is_a_type_error(out: Any) -> None:
    with pytest.raises(TypeError, match="out must be a pair of arrays, not "):
        grad_grad(out=out)


@pytest.mark.parametrize(
    "epsilon", [0, 1, 0.25, np.float32(0.25), np.float64(1e-4), Fraction(1, 4), -1.0, 3.4028235e38]
)
def test_epsilon_is_any_real_number_rounded_to_float32(epsilon: Any) -> None:
    assert v3_message(epsilon=epsilon).epsilon == np.float32(float(epsilon))


@pytest.mark.parametrize(
    ("argument", "kind", "value"),
    [
        (argument, kind, value)
        for argument, kind, values in (
            ("out", "a NumPy array or a PyTorch tensor", [[[1.0]], X.tobytes(), 1.0]),
            ("epsilon", "a number", ["0.1", None, True, np.True_, 1j, [0.1], np.array([0.1])]),
            ("is_training", "a bool", [1, 0, None, "True", np.array([True])]),
            ("data_format", "a str", [b"NHWC", None, 4]),
            ("reserve_space_2_kind", "a str", [None]),
            ("priority", "an int", [True, 1.0, "1", None]),
        )
        for value in values
    ],
)
def test_an_argument_of_another_type_is_a_type_error(argument: str, kind: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{argument} must be {kind}, not "):
        v3(**{argument: value})


@pytest.mark.parametrize("epsilon", [math.nan, math.inf, -math.inf, 1e39, -1e39, 10**400])
def test_an_epsilon_that_float32_does_not_hold_is_refused(epsilon: Any) -> None:
    with pytest.raises(bngrad.InvalidArgumentError, match="epsilon must be finite in float32, not ") as refused:
        v3(epsilon=epsilon)
    assert refused.value.violations[0].field == "epsilon"


def test_attributes_that_equal_good_ones_of_earlier_calls_are_refused_for_their_type() -> None:
    v3(epsilon=1.0, is_training=True, priority=1)
    for wrong in ({"epsilon": True}, {"is_training": 1}, {"priority": True}, {"priority": 1.0}):
        with pytest.raises(TypeError, match=next(iter(wrong))):
            v3(**{"epsilon": 1.0, "is_training": True, "priority": 1} | wrong)


def test_is_training_may_be_a_numpy_bool() -> None:
    assert v3_message(is_training=np.True_).is_training
    assert not v3_message(is_training=np.False_).is_training


def test_epsilon_is_never_minus_zero() -> None:
    assert math.copysign(1, v3_message(epsilon=-0.0).epsilon) == 1


@pytest.mark.parametrize("name", ["\ud800", "N" * 65])
def test_data_format_must_be_a_short_text(name: str) -> None:
    with pytest.raises(bngrad.InvalidArgumentError, match="data_format must be a name such as 'NHWC', not ") as refused:
        v3(data_format=name)
    assert refused.value.violations[0].field == "data_format"


def test_an_unknown_reserve_space_2_kind_is_refused() -> None:
    with pytest.raises(bngrad.InvalidArgumentError, match="must be 'variance' or 'inverse_std', not 'std'") as refused:
        v3(reserve_space_2_kind="std")
    assert refused.value.violations[0].field == "reserve_space_2_kind"
    with pytest.raises(bngrad.InvalidArgumentError, match="variance_kind must be 'variance' or") as refused:
        onednn((X, X, STATS, STATS, None), variance_kind="std")
    assert refused.value.violations[0].field == "variance_kind"


@pytest.mark.parametrize("priority", [-8, -1, 1, 8, np.int64(3)])
def test_a_priority_is_sent(priority: int) -> None:
    second_version = v2((X, X, STATS, STATS, STATS), priority=priority)
    training_backprop = onednn((X, X, STATS, STATS, None), priority=priority)
    assert v3_message(priority=priority).priority == priority
    assert pb.FusedBatchNormGradV2Request.FromString(message(second_version)).priority == priority
    assert pb.BatchNormTrainingBackpropRequest.FromString(message(training_backprop)).priority == priority


def test_no_priority_is_not_sent() -> None:
    assert not v3_message().HasField("priority")
    assert not v3_message(priority=0).HasField("priority")


@pytest.mark.parametrize("priority", [-9, 9, 2**70])
def test_a_priority_has_bounds(priority: int) -> None:
    with pytest.raises(bngrad.InvalidArgumentError, match=f"priority must be from -8 to 8, not {priority}") as refused:
        v3(priority=priority)
    with pytest.raises(bngrad.InvalidArgumentError, match="priority must be from -8 to 8, not a number too long"):
        v3(priority=priority * 10**5000)
    assert refused.value.violations[0].field == "priority"


@pytest.mark.parametrize(
    ("dtype", "data_type"),
    [("f2", pb.DATA_TYPE_FLOAT16), (BFLOAT16, pb.DATA_TYPE_BFLOAT16), ("f4", pb.DATA_TYPE_FLOAT32)],
)
@pytest.mark.parametrize("where", ["new", "strided", "apart"])
def test_results_are_the_callers_own_arrays(dtype: Any, data_type: pb.DataType, where: str) -> None:
    expected = X.astype(dtype)
    answer = answer_v3(x_backprop=tensor(expected, data_type))
    out = {"new": None, "strided": np.empty((2, 3, 4, 10), dtype)[..., ::2], "apart": expected.copy()}[where]
    if where == "apart":
        answer = answer_v3(x_backprop=pb.Tensor(dtype=data_type, shape=X.shape))
    results = v3().read(answer, [out], apart=where == "apart")
    assert out is None or results.x_backprop is out
    assert results.x_backprop.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(results.x_backprop, expected)
    np.testing.assert_array_equal(results.scale_backprop, STATS)
    np.testing.assert_array_equal(results.offset_backprop, STATS + 1)
    assert results.reserve_space_4.shape == results.reserve_space_5.shape == (0,)
    for array in results:
        assert array.flags.writeable
        assert array.flags.owndata or (array.base is not None and array.base.flags.owndata)


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (b"\xff\xff", "the server's answer is no FusedBatchNormGradV3Response"),
        (b"", "the server's answer has no x_backprop, scale_backprop, offset_backprop, reserve_space_4"),
        (answer_v3(x_backprop=None), "the server's answer has no x_backprop$"),
        (answer_v3(reserve_space_5=None), "the server's answer has no reserve_space_5$"),
        (answer_v3(x_backprop=pb.Tensor()), "the server's x_backprop has the dtype 0, which this client does not know"),
        *(
            (
                answer_v3(scale_backprop=pb.Tensor(dtype=pb.DATA_TYPE_FLOAT32, shape=shape, data=bytes(20))),
                rf"the server's scale_backprop has 20 bytes for shape {re.escape(str(shape))} of float32",
            )
            for shape in [(2, 3), (-1,), (-5, -1)]
        ),
    ],
)
def test_a_malformed_answer_is_an_internal_error(answer: bytes, complaint: str) -> None:
    with pytest.raises(bngrad.InternalError, match=complaint):
        v3().read(answer)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("other", [X[:1], X.astype(np.float16)], ids=["shape", "dtype"])
def test_an_answer_that_does_not_fit_its_buffer_is_an_internal_error(other: Any, apart: bool) -> None:
    data_type = pb.DATA_TYPE_FLOAT16 if other.dtype == np.float16 else pb.DATA_TYPE_FLOAT32
    has = r"\d+ bytes for shape" if apart else rf"shape .* of {other.dtype.name}, not \(2, 3, 4, 5\) of float32$"
    with pytest.raises(bngrad.InternalError, match=f"the server's x_backprop has {has}"):
        v3().read(answer_v3(x_backprop=tensor(other, data_type)), [np.empty_like(X)], apart=apart)


def test_every_field_of_server_info_is_read() -> None:
    endpoints = pb.Endpoints(stream_port=7, stream_host="a", local_directory="/there")
    answer = pb.ServerInfoResponse(
        version="1.2.3",
        devices=[
            pb.Device(name="cpu", description="a CPU", state=pb.WORKER_STATE_READY, restarts=2),
            pb.Device(name="cuda:0", description="a GPU", state=pb.WORKER_STATE_STARTING, memory_bytes=7),
            pb.Device(name="cuda:1", state=99),  # type: ignore[arg-type]
        ],
        limits=pb.Limits(max_message_bytes=5, arena_bytes=6),
        ops=["FusedBatchNormGradV3"],
        endpoints=endpoints,
        requests=3,
        unread_connections=8,
        batch_sizes=[4, 5],
        device_remark="no GPU",
        compiling=["float32-2"],
    )
    expected = bngrad.ServerInfo(
        version="1.2.3",
        devices=(
            bngrad.Device("cpu", "a CPU", "ready", 2, 0),
            bngrad.Device("cuda:0", "a GPU", "starting", 0, 7),
            bngrad.Device("cuda:1", "", "unspecified", 0, 0),
        ),
        ops=("FusedBatchNormGradV3",),
        max_message_bytes=5,
        arena_bytes=6,
        requests=3,
        unread_connections=8,
        batch_sizes=(4, 5),
        stream_port=endpoints.stream_port,
        stream_host=endpoints.stream_host,
        local_directory=endpoints.local_directory,
        device_remark="no GPU",
        compiling=("float32-2",),
    )
    assert codec.read_server_info(answer.SerializeToString()) == (expected, endpoints)


def test_an_answer_that_is_no_server_info_is_an_internal_error() -> None:
    with pytest.raises(bngrad.InternalError, match="the server's answer is no ServerInfoResponse"):
        codec.read_server_info(b"\xff\xff")
