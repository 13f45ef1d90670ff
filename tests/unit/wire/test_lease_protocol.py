"""The messages of the lease protocol."""

from __future__ import annotations

import pytest

from bngrad_wire import lease_protocol


@pytest.mark.parametrize("authorization", ["", "Bearer token", "Bearer é"])
def test_a_request_is_unpacked_as_it_was_packed(authorization: str) -> None:
    assert lease_protocol.unpack_request(lease_protocol.pack_request(4096, authorization)) == (4096, authorization)


def test_the_bytes_of_a_request_are_fixed() -> None:
    assert lease_protocol.pack_request(0x0102, "Bearer x") == b"\x02\x01\0\0\0\0\0\0Bearer x"


def test_a_size_that_does_not_fit_is_sent_as_the_largest() -> None:
    assert lease_protocol.unpack_request(lease_protocol.pack_request(2**70, "")) == (2**64 - 1, "")


@pytest.mark.parametrize("message", [b"", b"?", bytes(7), b"1234567"])
def test_a_short_request_has_no_size(message: bytes) -> None:
    assert lease_protocol.unpack_request(message)[0] == 0


def test_bytes_that_are_no_text_are_replaced() -> None:
    assert lease_protocol.unpack_request(bytes(8) + b"\xff") == (0, "\N{REPLACEMENT CHARACTER}")
