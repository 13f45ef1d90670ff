"""What each op's request means: every violation by its field."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import DecodeError, Message
from tests.hostile_messages import HOSTILE, SIZES, at_little_cost

from bngrad_kernels.problem import problem_type
from bngrad_kernels.spec import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    InvalidArgumentError,
    ReserveSpace2Kind,
    Spec,
    TensorHeader,
)
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_server.codec.ops import OPS, Op
from bngrad_server.codec.request_reader import RequestReader, ahead_header
from bngrad_wire.limits import MAX_RANK

V3, V2, ONEDNN, GRAD_GRAD = OPS
FLOAT = pb.DATA_TYPE_FLOAT32
LOCATION = pb.Location(region_key=b"k" * 16, offset=128)
SHAPE, CHANNELS = (2, 5, 6, 3), 3
NBYTES = 2 * 5 * 6 * 3 * 4


CHANGES: dict[str, Callable[[Any], object]] = {
    "no dtype": lambda tensor: tensor.ClearField("dtype"),
    "dtype 99": lambda tensor: setattr(tensor, "dtype", 99),
    "location": lambda tensor: tensor.location.CopyFrom(LOCATION),
    "only location": lambda tensor: tensor.CopyFrom(pb.Tensor(dtype=FLOAT, shape=[3], location=LOCATION)),
    "only ticket": lambda tensor: tensor.CopyFrom(pb.Tensor(dtype=FLOAT, shape=[3], ticket=b"t" * 16)),
    "location and data": lambda tensor: tensor.MergeFrom(pb.Tensor(location=LOCATION, data=b"data")),
    "many dimensions": lambda tensor: tensor.CopyFrom(pb.Tensor(dtype=FLOAT, shape=[2**62] * 7000)),
    "another shape": lambda tensor: tensor.shape.reverse(),
    "short": lambda tensor: setattr(tensor, "data", tensor.data[:-1]),
}
"""What may be wrong with a tensor."""


def tensor(shape: tuple[int, ...], fill: bytes = b"x", data_type: pb.DataType = FLOAT) -> pb.Tensor:
    nbytes = 4 if data_type == FLOAT else 2
    for length in shape:
        nbytes *= length
    return pb.Tensor(dtype=data_type, shape=shape, data=fill * nbytes)


def request_of(op: Op, *, chunked: bool = False) -> Any:
    """A valid request; each tensor has elements of its own."""
    tensors = {name: tensor(SHAPE, bytes([65 + i])) for i, name in enumerate(op.large_inputs)}
    if chunked:
        for large in tensors.values():
            large.ClearField("data")
    tensors |= {name: tensor((CHANNELS,), bytes([97 + i])) for i, name in enumerate(op.small_inputs)}
    return op.request_type(**tensors, epsilon=1e-3)


def violations(op: Op, request: Message, *, chunked: bool) -> list[tuple[str, str]]:
    with pytest.raises(InvalidArgumentError) as caught:
        RequestReader(op, chunked=chunked).read(request.SerializeToString())
    return [(violation.field, violation.description) for violation in caught.value.violations]


both_ways = pytest.mark.parametrize("chunked", [False, True], ids=["whole", "chunked"])
all_ops = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
located_anywhere = pytest.mark.parametrize(
    ("op", "located"),
    [pytest.param(op, name, id=f"{op.name}-{name}") for op in OPS for name in op.large_inputs + op.locations],
)


@all_ops
def test_elements_are_found_where_they_lie_in_the_message(op: Op) -> None:
    data = request_of(op).SerializeToString()
    request = RequestReader(op, chunked=False).read(data)
    assert [data[source] for source in request.large_inputs if isinstance(source, slice)] == [
        bytes([65 + i]) * NBYTES for i in range(len(op.large_inputs))
    ]
    assert [data[source] for source in request.small_inputs if source is not None] == [
        bytes([97 + i]) * 12 for i in range(len(op.small_inputs))
    ]
    assert request.spec == Spec(FLOAT32, SHAPE, 3, epsilon=1e-3, order=request.spec.order)
    assert request.kernel_key == (FLOAT32, True, True, 2 if op is GRAD_GRAD else 1)
    assert set(request.locations) == {None}
    assert request.tensors_nbytes == (5 if op is GRAD_GRAD else 3) * NBYTES


@all_ops
def test_the_fields_are_the_messages_own_in_the_order_of_the_problems(op: Op) -> None:
    request = RequestReader(op, chunked=False).read(request_of(op).SerializeToString())
    problem = problem_type(request.spec)
    fields = [field.name for field in op.request_type.DESCRIPTOR.fields]
    assert {*op.large_inputs, *op.small_inputs, *op.locations} <= {*fields}
    assert [len(op.large_inputs), len(op.small_inputs)] == [len(problem.large_inputs), len(problem.small_inputs)]
    assert len(op.locations) == len(problem.large_outputs)
    if op is not ONEDNN:  # which has other names for them
        outputs = [field.name for field in op.response_type.DESCRIPTOR.fields]
        assert [op.large_inputs, op.small_inputs] == [problem.large_inputs, problem.small_inputs]
        assert tuple(outputs[: len(problem.large_outputs + problem.small_outputs)]) == (
            problem.large_outputs + problem.small_outputs
        )


@all_ops
def test_a_chunked_request_has_its_large_elements_to_come(op: Op) -> None:
    request = RequestReader(op, chunked=True).read(request_of(op, chunked=True).SerializeToString())
    assert set(request.large_inputs) == {None}
    assert request.spec == Spec(FLOAT32, SHAPE, 3, epsilon=1e-3, order=request.spec.order)
    assert request.chunk_order == ((1, 0) if op is ONEDNN else tuple(range(len(op.large_inputs))))


@located_anywhere
def test_each_large_tensor_may_have_a_location_instead(op: Op, located: str) -> None:
    message = request_of(op)
    if located in op.locations:
        getattr(message, located).CopyFrom(LOCATION)
    else:
        getattr(message, located).ClearField("data")
        getattr(message, located).location.CopyFrom(LOCATION)
    request = RequestReader(op, chunked=False).read(message.SerializeToString())
    sources = dict(zip(op.large_inputs + op.locations, request.large_inputs + request.locations, strict=True))
    assert [name for name, source in sources.items() if isinstance(source, pb.Location)] == [located]
    assert sources[located] == LOCATION
    for number, (name, prefix) in enumerate(zip(op.locations, request.response, strict=False)):
        if name == located:
            field = op.response_type.DESCRIPTOR.fields[number].name
            large = getattr(op.response_type.FromString(prefix), field)
            assert (large.location, large.data) == (LOCATION, b"")


@all_ops
@both_ways
def test_the_pieces_of_the_response_are_a_message(op: Op, chunked: bool) -> None:
    request = RequestReader(op, chunked=chunked).read(request_of(op, chunked=chunked).SerializeToString())
    spec, problem = request.spec, problem_type(request.spec)
    large = [b"" if chunked else bytes([65 + i]) * spec.tensor_nbytes for i in range(len(problem.large_outputs))]
    small = [bytes([97 + i]) * spec.stats_nbytes for i in range(len(problem.small_outputs))]
    elements = [*large, *small, b""]
    response = op.response_type.FromString(
        b"".join(piece for pair in zip(request.response, elements, strict=True) for piece in pair)
    )
    tensors = [getattr(response, field.name) for field in op.response_type.DESCRIPTOR.fields]
    shapes = [SHAPE] * len(large) + [(3,)] * len(small)
    assert [each.data for each in tensors[: len(shapes)]] == elements[:-1]
    assert [tuple(each.shape) for each in tensors] == [*shapes, (0,), (0,)][: len(tensors)]
    assert all(each.dtype == FLOAT for each in tensors)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_a_location_may_have_the_ticket_of_its_copy(op: Op) -> None:
    message = request_of(op)
    first, second, *rest = op.large_inputs
    for name in (first, second):
        getattr(message, name).ClearField("data")
        getattr(message, name).location.CopyFrom(LOCATION)
    getattr(message, second).ticket = b"t" * 16
    request = RequestReader(op, chunked=False).read(message.SerializeToString())
    assert request.tickets == (b"", b"t" * 16, *(b"" for _ in rest))
    assert request.large_inputs[:2] == (LOCATION, LOCATION)
    assert (request.transport, request.new_nbytes) == ("shared", request.tensors_nbytes)
    getattr(message, second).data = b"data"
    assert violations(op, message, chunked=False) == [(second, f"{second} must not have a location beside data")]


@both_ways
@pytest.mark.parametrize(
    ("op", "field", "change", "words"),
    [
        *((V3, name, "absent", f"{name} must be given") for name in ("y_backprop", "x", "scale", "reserve_space_2")),
        *((GRAD_GRAD, name, "absent", f"{name} must be given") for name in ("grad_x_backprop", "grad_scale_backprop")),
        (GRAD_GRAD, "grad_x_backprop", "another shape", "must have same shape"),
        (GRAD_GRAD, "grad_offset_backprop", "short", "must have 12 bytes of data .* not 11"),
        *((ONEDNN, name, "absent", f"{name} must be given") for name in ("input_forward", "output_delta", "mean")),
        (V3, "x", "no dtype", "one of the dtypes DATA_TYPE_FLOAT16, .*, not DATA_TYPE_UNSPECIFIED"),
        (V3, "x", "dtype 99", "not 99"),
        (V3, "reserve_space_1", "dtype 99", "not 99"),
        (V3, "scale", "location", "scale must not have a location beside data"),
        (V3, "scale", "only location", "scale must not have a location$"),
        (V3, "reserve_space_3", "only location", "reserve_space_3 must not have a location$"),
        (V3, "scale", "only ticket", "scale must not have a ticket$"),
        (GRAD_GRAD, "grad_scale_backprop", "only ticket", "grad_scale_backprop must not have a ticket$"),
        (V3, "x", "location and data", "x must not have a location beside data"),
        (ONEDNN, "output_delta", "location and data", "output_delta must not have a location beside data"),
        (V3, "x", "many dimensions", "x must have at most 32 dimensions, not 7000"),
        (V3, "reserve_space_3", "many dimensions", "reserve_space_3 must have at most 32 dimensions, not 7000"),
        (V3, "y_backprop", "another shape", "must have same shape"),
        (V3, "scale", "short", "must have 12 bytes of data .* not 11"),
        (V3, "epsilon", -1.0, "epsilon must be finite and not negative"),
        (ONEDNN, "epsilon", 0.0, "epsilon must be finite and positive"),
        (ONEDNN, "epsilon", "absent", "epsilon must be given"),
        (V3, "data_format", "NWHC", "data_format must be one of NHWC, NCHW, NDHWC, NCDHW, not 'NWHC'"),
        (V2, "data_format", "NDHWC", "data_format must be one of NHWC, NCHW, not 'NDHWC'"),
        (V3, "reserve_space_2_kind", 9, "must be a known ReserveSpace2Kind, not 9"),
        (ONEDNN, "variance_kind", 9, "variance_kind must be a known ReserveSpace2Kind, not 9"),
    ],
)
def test_what_is_wrong_is_named_by_its_field(op: Op, field: str, change: Any, words: str, chunked: bool) -> None:
    message = request_of(op, chunked=chunked)
    if change == "absent":
        message.ClearField(field)
    elif change in CHANGES:
        CHANGES[change](getattr(message, field))
    else:
        setattr(message, field, change)
    found = violations(op, message, chunked=chunked)
    assert {name for name, _ in found} == {field}

    assert re.search(words, found[0][1])


@pytest.mark.parametrize("chunked", [False, True])
def test_elements_must_be_as_many_as_the_shape_says_unless_they_come_apart(chunked: bool) -> None:
    message = request_of(V3, chunked=not chunked)
    found = violations(V3, message, chunked=chunked)
    assert [name for name, _ in found] == (["y_backprop", "x"] if chunked else ["x", "y_backprop"])
    words = "must come in chunks, not with 720 bytes of data" if chunked else "must have 720 bytes of data"
    assert all(words in description for _, description in found)


@located_anywhere
def test_no_location_is_taken_where_elements_come_in_chunks(op: Op, located: str) -> None:
    message = request_of(op, chunked=True)
    part = getattr(message, located)
    (part if located in op.locations else part.location).CopyFrom(LOCATION)
    ((field, description),) = violations(op, message, chunked=True)
    assert field == located
    assert description.startswith(f"{located} must not ")


def test_everything_that_is_wrong_is_named_at_once() -> None:
    found = violations(V3, pb.FusedBatchNormGradV3Request(scale=tensor((3,))), chunked=False)
    assert [name for name, _ in found] == ["y_backprop", "x", "reserve_space_1", "reserve_space_2"]


@both_ways
@pytest.mark.parametrize("shape", [(-2, 5, 6, 3), (2**40, 2**40, 2, 3), (0, 2**62, 4, 3)])
def test_shapes_that_no_tensor_has_are_refused(shape: tuple[int, ...], chunked: bool) -> None:
    message = request_of(V3, chunked=chunked)
    for name in ("x", "y_backprop"):
        getattr(message, name).shape[:] = shape
    assert {name for name, _ in violations(V3, message, chunked=chunked)} == {"x", "y_backprop"}


@pytest.mark.parametrize(
    ("op", "changes", "spec"),
    [
        (V3, {}, Spec(FLOAT32, SHAPE, 3)),
        (V3, {"epsilon": 0.5, "is_training": False}, Spec(FLOAT32, SHAPE, 3, epsilon=0.5, is_training=False)),
        (
            V3,
            {"reserve_space_2_kind": pb.RESERVE_SPACE2_KIND_INVERSE_STD},
            Spec(FLOAT32, SHAPE, 3, reserve_space_2_kind=ReserveSpace2Kind.INVERSE_STD),
        ),
        (V3, {"reserve_space_3": pb.Tensor(dtype=FLOAT, shape=[7])}, Spec(FLOAT32, SHAPE, 3)),
        (V2, {"data_format": "NHWC"}, Spec(FLOAT32, SHAPE, 3)),
        (GRAD_GRAD, {"is_training": False}, Spec(FLOAT32, SHAPE, 3, is_training=False, order=2)),
        (ONEDNN, {"epsilon": 1e-4, "gamma": None}, Spec(FLOAT32, SHAPE, 3)),
        (
            ONEDNN,
            {"epsilon": 1e-4, "variance_kind": pb.RESERVE_SPACE2_KIND_INVERSE_STD},
            Spec(FLOAT32, SHAPE, 3, reserve_space_2_kind=ReserveSpace2Kind.INVERSE_STD),
        ),
        (
            ONEDNN,
            {
                "epsilon": 1e-4,
                **{name: tensor((4, 3), data_type=pb.DATA_TYPE_BFLOAT16) for name in ("input_forward", "output_delta")},
                **{name: tensor((3,), data_type=pb.DATA_TYPE_BFLOAT16) for name in ("mean", "variance", "gamma")},
            },
            Spec(BFLOAT16, (4, 3), 1, stats_dtype=BFLOAT16),
        ),
        (
            V2,
            {
                "data_format": "NCHW",
                **{name: tensor((2, 3, 5, 6), data_type=pb.DATA_TYPE_FLOAT16) for name in ("x", "y_backprop")},
            },
            Spec(FLOAT16, (2, 3, 5, 6), 1),
        ),
    ],
)
def test_attributes_that_are_left_out_have_the_ops_defaults(op: Op, changes: dict[str, Any], spec: Spec) -> None:
    message = request_of(op)
    for name in {"epsilon", *changes}:
        message.ClearField(name)
    message.MergeFrom(op.request_type(**changes))
    request = RequestReader(op, chunked=False).read(message.SerializeToString())
    assert request.spec == spec
    assert request.kernel_key == (spec.dtype, spec.inner == 1, spec.is_training, spec.order)
    assert (None in request.small_inputs) == ("gamma" in changes and changes["gamma"] is None)


@all_ops
def test_what_is_no_message_is_refused_by_the_ops_name(op: Op) -> None:
    with pytest.raises(DecodeError, match=f"the request is no {op.name}Request: "):
        RequestReader(op, chunked=False).read(b"\x0a\xff")


@both_ways
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("content", HOSTILE)
def test_no_message_costs_more_than_a_good_one(content: str, size: int, chunked: bool) -> None:
    reader, message = RequestReader(V3, chunked=chunked), HOSTILE[content](size)
    words = "must have at most (256 fields|65536 bytes)" if size == SIZES[-1] else "."
    with at_little_cost(), pytest.raises((InvalidArgumentError, DecodeError), match=words):
        reader.read(message)


@both_ways
def test_how_a_refused_request_travelled_is_known_if_it_was_read_before(chunked: bool) -> None:
    message = request_of(V3, chunked=chunked)
    if not chunked:
        message.x_backprop_location.CopyFrom(LOCATION)
    reader, data = RequestReader(V3, chunked=chunked), message.SerializeToString()
    assert reader.transport_of(data) == ("stream" if chunked else "unary")
    reader.read(data)
    assert reader.transport_of(data) == ("stream" if chunked else "shared")


def test_requests_that_differ_in_their_elements_alone_are_validated_once() -> None:
    reader, message = RequestReader(V3, chunked=False), request_of(V3)
    first = reader.read(message.SerializeToString())
    message.x.data = message.x.data[::-1].replace(b"x", b"z")
    assert reader.read(message.SerializeToString()) is first
    message.epsilon = 0.25
    assert reader.read(message.SerializeToString()).spec.epsilon == 0.25


@pytest.mark.parametrize("rank", [2, MAX_RANK])
def test_a_tensor_that_is_sent_ahead_has_the_size_of_its_shape(rank: int) -> None:
    shape = (3, 2, *(1,) * (rank - 2))
    header = pb.Tensor(dtype=pb.DATA_TYPE_BFLOAT16, shape=shape, location=LOCATION)
    assert ahead_header(header) == TensorHeader(BFLOAT16, shape, 12)


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        pytest.param({"dtype": 99}, "must have one of the dtypes .*, not 99", id="dtype"),
        pytest.param({"shape": [3]}, f"must have 2 to {MAX_RANK} dimensions, not 1", id="1-D"),
        pytest.param({"shape": [1] * 33}, f"must have 2 to {MAX_RANK} dimensions, not 33", id="33-D"),
        pytest.param({"shape": [3, 0]}, r"must have at least one element, not shape \(3, 0\)", id="empty"),
        pytest.param({"shape": [-3, -1]}, r"must have at least one element, not shape \(-3, -1\)", id="negative"),
        pytest.param({"data": b"data"}, "must have neither data nor a ticket", id="data"),
        pytest.param({"ticket": b"t" * 16}, "must have neither data nor a ticket", id="ticket"),
    ],
)
def test_a_tensor_that_is_sent_ahead_is_one_that_a_request_may_have(header: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"tensor {problem}") as caught:
        ahead_header(pb.Tensor(**{"dtype": FLOAT, "shape": [2, 3], **header}))
    assert [violation.field for violation in caught.value.violations] == ["tensor"]
