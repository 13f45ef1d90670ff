"""The codec against protobuf: it must read and write exactly what protobuf 7 does.

Protobuf 6 differs in one thing: it also reads lengths of more than five bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import chain
from typing import TypeAlias

import pytest
from google.protobuf.message import DecodeError
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_wire import fields, messages

Request = pb.FusedBatchNormGradV3Request
TENSOR_FIELDS = [field for field in Request.DESCRIPTOR.fields if field.message_type is pb.Tensor.DESCRIPTOR]
VARINT, FIXED64, LEN, START_GROUP, END_GROUP, FIXED32 = range(6)

tensors = st.builds(
    pb.Tensor,
    dtype=st.sampled_from(pb.DataType.values()),
    shape=st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 300), max_size=5),
    data=st.none() | st.binary(max_size=300),
    location=st.none() | st.builds(pb.Location, region_key=st.binary(max_size=16), offset=st.integers(0, 2**62)),
)
requests = st.builds(
    Request,
    **{field.name: st.none() | tensors for field in TENSOR_FIELDS},
    epsilon=st.none() | st.floats(width=32, allow_nan=False),
    data_format=st.sampled_from([None, "", "NHWC", "é"]),
    is_training=st.none() | st.booleans(),
    x_backprop_location=st.none() | st.builds(pb.Location, offset=st.integers(0, 1000)),
)


def varint(value: int, extra: int = 0) -> bytes:
    """Returns a varint, with ``extra`` bytes more than it needs."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    if extra:
        out[-1] |= 0x80
        out += b"\x80" * (extra - 1) + b"\x00"
    return bytes(out)


def field(number: int, wire_type: int, content: bytes) -> bytes:
    return varint(number << 3 | wire_type) + content


def sized(number: int, content: bytes) -> bytes:
    return field(number, LEN, varint(len(content)) + content)


numbers = st.sampled_from([*range(1, 13), 15, 16, 1000, 2**29 - 1])
varints = st.builds(
    varint,
    st.sampled_from([0, 1, 3, 127, 128, 2**31, 2**32, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1),
    st.sampled_from([0, 0, 0, 1, 2, 5, 9]),
)
scalars = st.one_of(
    st.builds(field, numbers, st.just(VARINT), varints),
    st.builds(field, numbers, st.just(FIXED64), st.binary(min_size=8, max_size=8)),
    st.builds(field, numbers, st.just(FIXED32), st.binary(min_size=4, max_size=4)),
    st.builds(sized, numbers, st.sampled_from([b"NHWC", b"\xff\xfe", b""])),
    st.builds(lambda packed: sized(2, b"".join(packed)), st.lists(varints, max_size=4)),
    st.builds(lambda value: field(2, VARINT, value), varints),
)

unknown_fields = st.builds(field, st.integers(12, 5000), st.just(VARINT), varints)


def _nested(inner: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    contents = st.lists(inner, max_size=4).map(b"".join)
    return st.one_of(
        st.builds(sized, st.integers(1, 12), contents),
        st.builds(lambda n, content: field(n, START_GROUP, content) + field(n, END_GROUP, b""), numbers, contents),
    )


wire_messages = st.lists(st.recursive(scalars, _nested, max_leaves=8), max_size=5).map(b"".join)
"""Messages of known and unknown fields in any order and nesting; protobuf accepts most of them."""


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    data = bytearray(draw(wire_messages | requests.map(lambda request: request.SerializeToString())))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(["set", "insert", "delete", "cut", "repeat"])):
            case "set" if at < len(data):
                data[at] = draw(st.integers(0, 255))
            case "insert":
                data[at:at] = draw(st.binary(max_size=4))
            case "delete":
                del data[at : at + draw(st.integers(1, 6))]
            case "cut":
                del data[at:]
            case _:
                data += data[at : at + 60]
    return bytes(data)


def parsed(data: bytes) -> Request | None:
    try:
        return Request.FromString(data)
    except DecodeError:
        return None


TAKES_LONG_LENGTHS = parsed(b"\x0a" + varint(0, extra=9)) is not None
"""Whether the installed protobuf reads lengths of more than five bytes: 6 does, 7 does not."""


Layout: TypeAlias = messages.Layout[Request]
Decoder: TypeAlias = messages.Decoder[Request, Layout]


def whole(layout: Layout, data: bytes) -> Request:
    """Returns the message with its elements."""
    request = Request()
    request.CopyFrom(layout.message)
    for name, span in layout.tensors.items():
        tensor = getattr(request, name)
        assert span.header == tensor
        assert not tensor.data
        tensor.SetInParent()
        tensor.data = data[span.start : span.start + span.nbytes]
    return request


def new_decoder(interpret: Callable[[Layout], Layout] = lambda layout: layout) -> Decoder:
    return messages.Decoder(Request, interpret)


def has_long_length(data: bytes) -> bool:
    """Returns whether the decoder finds a length of more than five bytes, as protobuf 7 does."""
    try:
        new_decoder().decode(data)
    except DecodeError as error:
        found = re.fullmatch("the varint at byte ([0-9]+) has more than 5 bytes", str(error))
        return found is not None and all(byte >= 0x80 for byte in data[int(found[1]) :][:5])
    return False


def decoded(data: bytes, decoder: Decoder | None = None) -> Request | None:
    try:
        layout = (decoder or new_decoder()).decode(data)
    except DecodeError:
        return None
    return whole(layout, data)


@given(wire_messages | mutated())
def test_what_protobuf_reads_is_read_likewise_and_what_it_rejects_is_rejected(data: bytes) -> None:
    assume(not (TAKES_LONG_LENGTHS and has_long_length(data)))
    assert decoded(data) == parsed(data)


@given(requests)
def test_every_request_is_read_as_it_was_written(request: Request) -> None:
    assert decoded(request.SerializeToString()) == request


@given(requests, st.randoms(use_true_random=False), st.lists(unknown_fields))
def test_fields_may_come_in_any_order_and_between_unknown_ones(
    request: Request, random: object, unknown: list[bytes]
) -> None:
    pieces = [Request(**{name.name: value}).SerializeToString() for name, value in request.ListFields()] + unknown
    random.shuffle(pieces)  # type: ignore[attr-defined]
    data = b"".join(pieces)
    assert decoded(data) == parsed(data)


HALVES = [
    pb.Tensor(dtype=pb.DATA_TYPE_FLOAT32, shape=[2, 3], data=b"first"),
    pb.Tensor(shape=[5], data=b"second", location=pb.Location(offset=64)),
    pb.Tensor(location=pb.Location(region_key=b"key")),
]


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([sized(1, half.SerializeToString()) for half in HALVES], id="a tensor in parts"),
        pytest.param([sized(1, b"".join(half.SerializeToString() for half in HALVES))], id="a tensor's fields twice"),
        pytest.param([sized(1, sized(3, b"full") + sized(3, b""))], id="elements that come twice, then empty"),
        pytest.param([sized(1, b"")], id="an empty tensor"),
        pytest.param([], id="an empty message"),
        pytest.param([sized(1, field(2, VARINT, b"\x07") + sized(2, b"\x08\x09"))], id="a shape packed and not"),
        pytest.param([field(1, VARINT, b"\x01"), sized(1, field(3, VARINT, b"\x01"))], id="other wire types"),
        pytest.param([b"\x8a\x00", b"\x84\x00", sized(3, b"ab")], id="a tag and a length in more bytes than needed"),
    ],
)
def test_unusual_encodings_are_read_as_protobuf_reads_them(pieces: list[bytes]) -> None:
    data = b"".join(pieces)
    assert parsed(data) is not None
    assert decoded(data) == parsed(data)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x0a" + varint(4, extra=5) + sized(3, b"ab"), id="in six bytes"),
        pytest.param(b"\x0a" + varint(4, extra=9) + sized(3, b"ab"), id="in ten bytes"),
        pytest.param(sized(1, b"\x1a" + varint(2, extra=5) + b"ab"), id="of elements"),
        pytest.param(sized(1, b"\x12" + varint(1, extra=5) + b"\x03"), id="of a shape"),
        pytest.param(b"\x42" + varint(4, extra=5) + b"NHWC", id="of a text"),
        pytest.param(b"\x7a" + varint(0, extra=5), id="of an unknown field"),
        pytest.param(b"\x7b\x0a" + varint(0, extra=5) + b"\x7c", id="in a group"),
        pytest.param(b"\x5a" + b"\x80" * 9 + b"\x02", id="beyond 64 bits, whose low bits are 0"),
    ],
)
def test_lengths_of_more_than_five_bytes_are_rejected_as_by_protobuf_7(data: bytes) -> None:
    assert (parsed(data) is not None) == TAKES_LONG_LENGTHS
    with pytest.raises(DecodeError, match=r"the varint at byte [0-9]+ has more than 5 bytes"):
        new_decoder().decode(data)


def test_a_length_may_have_five_bytes() -> None:
    data = b"\x0a" + varint(4, extra=4) + sized(3, b"ab")
    assert decoded(data) == parsed(data) == Request(y_backprop=pb.Tensor(data=b"ab"))


DEPTHS = range(97, 103)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("fields", [(), (1,), (1, 4), (11,)], ids=["top", "tensor", "its location", "a location"])
def test_groups_may_be_nested_as_deep_as_in_protobuf(fields: tuple[int, ...], depth: int) -> None:
    data = field(15, START_GROUP, b"") * depth + field(15, END_GROUP, b"") * depth
    for number in reversed(fields):
        data = sized(number, data)
    assert (decoded(data) is None) == (parsed(data) is None)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x02\x00", id="field 0"),
        pytest.param(b"\x0e", id="wire type 6"),
        pytest.param(b"\x0c", id="a group's end alone"),
        pytest.param(b"\x7b\x84\x01", id="a group ended as another"),
        pytest.param(b"\x7b", id="a group without end"),
        pytest.param(b"\x0a\x05ab", id="a tensor that is cut off"),
        pytest.param(b"\x0a\x02\x1a\x05" + b"elements", id="elements beyond their tensor"),
        pytest.param(b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", id="a length of 2**64 - 1"),
        pytest.param(b"\x0a" + b"\x80" * 11, id="a length without end"),
        pytest.param(b"\x80" * 6 + b"\x01", id="a tag without end"),
        pytest.param(sized(8, b"\xff"), id="text that is not UTF-8"),
        pytest.param(b"\x7d\x00", id="four bytes that are cut off"),
    ],
)
def test_malformed_messages_are_rejected(data: bytes) -> None:
    assert parsed(data) is None
    with pytest.raises(DecodeError):
        new_decoder().decode(data)


@given(requests, st.integers(0, 10**6))
def test_a_message_cut_off_is_read_as_protobuf_reads_it(request: Request, end: int) -> None:
    data = request.SerializeToString()
    data = data[: end % (len(data) + 1)]
    assert decoded(data) == parsed(data)


@settings(max_examples=30)
@given(st.lists(wire_messages | mutated() | requests.map(lambda request: request.SerializeToString()), max_size=6))
def test_a_decoder_with_cached_layouts_reads_other_messages_correctly(sequence: list[bytes]) -> None:
    decoder = new_decoder()
    for data in chain(sequence, sequence):
        if not (TAKES_LONG_LENGTHS and has_long_length(data)):
            assert decoded(data, decoder) == parsed(data)


def tensor_message(shape: list[int], data: bytes, epsilon: float = 1e-3) -> bytes:
    return Request(x=pb.Tensor(dtype=pb.DATA_TYPE_FLOAT32, shape=shape, data=data), epsilon=epsilon).SerializeToString()


def test_messages_that_differ_in_their_elements_alone_share_a_layout() -> None:
    decoder = new_decoder()
    first, second = (decoder.decode(tensor_message([2, 3], bytes([i]) * 24)) for i in range(2))
    assert first is second


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (tensor_message([2, 3], bytes(24)), tensor_message([3, 2], bytes(24))),
        (tensor_message([2, 3], bytes(24)), tensor_message([2, 3], bytes(24), epsilon=2e-3)),
        (sized(1, sized(3, b"ab")), sized(2, sized(3, b"ab"))),
        (sized(1, sized(3, b"ab")), sized(1, sized(5, b"ab"))),
        # The elements of the one look like a field of the other.
        (sized(1, sized(3, sized(5, b""))), sized(1, sized(3, b"") + sized(5, b""))),
        (sized(1, sized(3, b"ab")) + sized(1, sized(3, b"cd")), sized(1, sized(3, b"ab")) + sized(2, sized(3, b"cd"))),
    ],
)
def test_messages_of_one_length_that_differ_otherwise_are_not_mixed_up(one: bytes, other: bytes) -> None:
    assert len(one) == len(other)
    decoder = new_decoder()
    for data in (one, other, one, other):
        assert decoded(data, decoder) == parsed(data)
    assert decoder.decode(one) is not decoder.decode(other)


@given(requests)
def test_a_layout_stays_as_it_is_when_its_messages_memory_is_used_anew(request: Request) -> None:
    data = request.SerializeToString()
    memory, decoder = bytearray(data), new_decoder()
    layout = decoder.decode(memoryview(memory))
    memory[:] = bytes(len(memory))
    assert whole(layout, data) == request
    assert whole(decoder.decode(memoryview(data)), data) == request


def test_a_message_that_means_nothing_is_not_cached() -> None:
    def refuse(layout: Layout) -> Layout:
        raise LookupError

    decoder = new_decoder(refuse)
    for _ in range(2):
        with pytest.raises(LookupError):
            decoder.decode(b"")
    assert decoder.known(b"") is None


def located_message(offset: int, x_backprop_offset: int = 0) -> bytes:
    locations = [pb.Location(region_key=bytes(16), offset=each) for each in (offset, x_backprop_offset)]
    x = pb.Tensor(dtype=pb.DATA_TYPE_FLOAT32, shape=[2, 3], location=locations[0])
    scale = pb.Tensor(dtype=pb.DATA_TYPE_FLOAT32, shape=[3], data=bytes(12))
    return Request(x=x, scale=scale, x_backprop_location=locations[1]).SerializeToString()


@pytest.mark.parametrize(
    "sent",
    [
        [located_message(2**20 + n) for n in range(500)],
        [located_message(0, 2**20 + n) for n in range(32)],
        [tensor_message([n % 100, 1], bytes(n // 4)) for n in range(500)],
    ],
    ids=["arrays in shared memory", "results in shared memory", "shapes"],
)
def test_hundreds_of_layouts_are_known_at_once(sent: list[bytes]) -> None:
    decoder = new_decoder()
    layouts = [decoder.decode(data) for data in sent]
    assert all(decoder.known(data) is layout for data, layout in zip(sent, layouts, strict=True))


@pytest.mark.parametrize(
    ("sent", "most"),
    [
        ([tensor_message([n % 100, 1], bytes(n // 4)) for n in range(5000)], 2048),
        ([located_message(0, 2**20 + n) for n in range(500)], 32),
        ([sized(1, sized(5, bytes(n)) + sized(3, bytes(20 - n))) for n in range(20)], 8),
    ],
    ids=["any", "with the same beginning", "whose beginnings have different lengths"],
)
def test_a_decoder_caches_a_limited_number_of_layouts(sent: list[bytes], most: int) -> None:
    decoder = new_decoder()
    for data in sent:
        assert decoder.known(data) is None
        layout = decoder.decode(data)
        assert decoder.known(data) is layout
    assert 0 < sum(decoder.known(data) is not None for data in sent) <= most


@pytest.mark.parametrize(
    ("data", "is_cached"),
    [(sized(100, bytes(2000)), False), (sized(1, sized(3, bytes(2**20)) * 2), True), (sized(100, bytes(1000)), True)],
    ids=["a long unknown field", "elements twice", "a short unknown field"],
)
def test_only_a_message_with_little_beside_its_elements_is_cached(data: bytes, is_cached: bool) -> None:
    decoder = new_decoder()
    assert decoded(data, decoder) == parsed(data)
    assert (decoder.known(data) is not None) == is_cached


@pytest.mark.parametrize("unknown", [field(15, VARINT, b"\x01"), sized(15, b""), field(15, FIXED32, bytes(4))])
@pytest.mark.parametrize("where", [lambda content: content, lambda content: sized(1, content)], ids=["top", "tensor"])
def test_a_message_has_a_limited_number_of_fields(where: Callable[[bytes], bytes], unknown: bytes) -> None:
    most = fields.MAX_FIELDS - len(where(b"")) // 2
    assert decoded(where(unknown * most)) == parsed(where(unknown * most))
    with pytest.raises(DecodeError, match="a message must have at most 256 fields, with those of its tensors"):
        new_decoder().decode(where(unknown * (most + 1)))


@pytest.mark.parametrize("too_many", [0, 1])
@pytest.mark.parametrize("others", [[], [sized(15, bytes(500))] * 3], ids=["one field", "several"])
def test_a_message_has_a_limited_size_beside_its_elements(others: list[bytes], too_many: int) -> None:
    rest = fields.MAX_NBYTES - sum(map(len, others)) + too_many
    last = sized(15, bytes(rest - 4))
    assert len(last) == rest
    data = sized(1, sized(3, bytes(2**20)) * 3).join([b"", *others, last, b""])
    if too_many:
        with pytest.raises(DecodeError, match="a message must have at most 65536 bytes beside the elements of its"):
            new_decoder().decode(data)
    else:
        assert decoded(data) == parsed(data)


@given(requests, st.integers(0, 10**6))
def test_no_beginning_of_a_good_message_is_rejected(request: Request, end: int) -> None:
    data = request.SerializeToString()
    new_decoder().check_beginning(data[: end % (len(data) + 1)], len(data))


@given(wire_messages | mutated(), st.integers(0, 10**6))
def test_a_message_is_bad_if_its_beginning_is(data: bytes, end: int) -> None:
    try:
        new_decoder().check_beginning(data[: end % (len(data) + 1)], len(data))
    except DecodeError:
        with pytest.raises(DecodeError):
            new_decoder().decode(data)


@pytest.mark.parametrize("unknown", [b"\x78\0", b"\x7a\0", b"\x7b\x7c", b"\x48\0", b"\x0a\0", b"\x10\x01", b"\x1a\0"])
@pytest.mark.parametrize("is_nested", [False, True])
def test_the_first_kilobyte_shows_that_a_message_has_too_many_fields(unknown: bytes, is_nested: bool) -> None:
    data = unknown * 2**20
    if is_nested:
        data = sized(1, data)
    with pytest.raises(DecodeError, match="at most"):
        new_decoder().check_beginning(data[:1024], len(data))


@given(requests)
def test_encoded_messages_are_those_of_protobuf(request: Request) -> None:
    others, pieces = Request(), []
    others.CopyFrom(request)
    for each in TENSOR_FIELDS:
        if request.HasField(each.name):
            header = pb.Tensor()
            header.CopyFrom(getattr(request, each.name))
            header.ClearField("data")
            data = getattr(request, each.name).data
            pieces += [messages.tensor_prefix(each.number, header, len(data)), data]
        others.ClearField(each.name)
    message = b"".join([*pieces, others.SerializeToString()])
    assert parsed(message) == request
    assert decoded(message) == request


@given(st.integers(1, 15), st.sampled_from([0, 1, 127, 128, 2**14, 2**21]) | st.integers(0, 1000), st.booleans())
def test_the_only_field_is_found_in_the_first_bytes_of_its_message(number: int, nbytes: int, cut: bool) -> None:
    prefix = messages.field_prefix(number, nbytes)
    assert len(prefix) <= messages.PREFIX_NBYTES
    message = prefix + bytes(nbytes)
    seen = message[: messages.PREFIX_NBYTES] if cut else message
    assert messages.only_field(seen, len(message)) == (number, len(prefix))
    for other in (len(message) - 1, len(message) + 1):
        assert messages.only_field(seen, other) is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x0a",
        b"\x08\x01",
        b"\x02\x00",
        b"\x0a\x80\x80\x80\x80\x80\x00",
        sized(16, b""),
        sized(1, b"") + sized(2, b""),
        sized(1, b"") * 2,
    ],
    ids=lambda data: data.hex(" "),
)
def test_a_message_that_is_not_just_one_field_has_no_only_field(data: bytes) -> None:
    assert messages.only_field(data, len(data)) is None
