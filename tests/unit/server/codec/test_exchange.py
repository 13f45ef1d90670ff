"""The messages that begin a request of an exchange, read as protobuf reads them."""

from __future__ import annotations

from contextlib import suppress

import pytest
from google.protobuf.message import DecodeError
from tests.hostile_messages import HOSTILE, SIZES, at_little_cost, sized

from bngrad_kernels.spec import InvalidArgumentError
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_server.codec.exchange import request_of

UNKNOWN = b"\xf8\x07\x01"
V2 = pb.FusedBatchNormGradV2Request(epsilon=0.5, x=pb.Tensor(shape=[2, 3]))
V3 = pb.FusedBatchNormGradV3Request(data_format="NCHW")
MORE_V3 = pb.FusedBatchNormGradV3Request(epsilon=0.25, x=pb.Tensor(shape=[4], data=bytes(2**20)))
A, B, C = (
    pb.ExchangeRequest(fused_batch_norm_grad_v2=V2).SerializeToString(),
    pb.ExchangeRequest(fused_batch_norm_grad_v3=V3).SerializeToString(),
    pb.ExchangeRequest(fused_batch_norm_grad_v3=MORE_V3).SerializeToString(),
)
CHUNK = pb.ExchangeRequest(chunk=bytes(2**20)).SerializeToString()


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(A, id="alone"),
        pytest.param(UNKNOWN * 100 + A + UNKNOWN, id="beside unknown fields"),
        pytest.param(A + sized(100, bytes(60_000)), id="beside a long field"),
        pytest.param(B + UNKNOWN + C, id="in two parts"),
        pytest.param(C + A + B, id="after another, after one of the same"),
        pytest.param(CHUNK + B, id="after a chunk"),
        pytest.param(b"\x08\x01" + B, id="after its number with another wire type"),
    ],
)
def test_a_request_is_read_as_by_protobuf(message: bytes) -> None:
    expected = pb.ExchangeRequest.FromString(message)
    number, data = request_of(message)
    part = pb.ExchangeRequest.DESCRIPTOR.fields_by_number[number]
    assert part.name == expected.WhichOneof("part")
    request = getattr(expected, part.name)
    assert type(request).FromString(data) == request


@pytest.mark.parametrize(
    ("message", "found"), [(b"", "nothing"), (UNKNOWN, "nothing"), (CHUNK, "chunk"), (A + CHUNK, "chunk")]
)
def test_a_message_without_a_request_is_refused(message: bytes, found: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"a request must come first, not {found}"):
        request_of(message)


@pytest.mark.parametrize(
    ("beside", "words"),
    [
        (UNKNOWN * 256, "must have at most 256 fields"),
        (sized(15, bytes(2**16)), "must have at most 65536 bytes beside the elements"),
        (b"\xff" * 6, "has more than 5 bytes"),
    ],
)
def test_what_comes_beside_a_request_is_limited(beside: bytes, words: str) -> None:
    for message in (beside + A, A + beside):
        with pytest.raises(DecodeError, match=f"the message is no ExchangeRequest: .*{words}"):
            request_of(message)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("content", HOSTILE)
def test_no_message_costs_more_than_a_good_one(content: str, size: int) -> None:
    message = HOSTILE[content](size)
    with at_little_cost(copied_nbytes=2 * size), suppress(InvalidArgumentError, DecodeError):
        request_of(message)
