"""What the decoder of header blocks remembers."""

from __future__ import annotations

from bngrad_wire.http2.block_decoder import REQUEST_PSEUDO_HEADERS, BlockDecoder

ADD_A, ADD_B = b"\x40\x01a\x011", b"\x40\x01b\x012"
"""Literals that the dynamic table keeps."""
NEWEST, OLDEST = b"\xbe", b"\xbf"
"""The first and second entry of the dynamic table."""
NO_TABLE = b"\x20"


def test_a_block_that_refers_to_the_table_is_remembered_until_the_table_changes() -> None:
    decoder = BlockDecoder(REQUEST_PSEUDO_HEADERS)
    assert decoder.known(NEWEST) is None
    decoder.decode(ADD_A)
    first = decoder.decode(NEWEST)
    assert first.headers == {"a": "1"}
    assert decoder.decode(NEWEST) is decoder.known(NEWEST) is first
    assert not first.encoded  # as it does not always mean the same
    decoder.decode(ADD_B)
    assert decoder.known(NEWEST) is None
    assert decoder.decode(NEWEST).headers == {"b": "2"}
    assert decoder.decode(OLDEST).headers == {"a": "1"}
    decoder.decode(NO_TABLE)
    assert decoder.known(NEWEST) is None


def test_a_block_that_changes_the_table_is_decoded_each_time() -> None:
    decoder = BlockDecoder(REQUEST_PSEUDO_HEADERS)
    for _ in range(2):
        decoder.decode(ADD_A)
        assert decoder.known(ADD_A) is None
    assert decoder.decode(OLDEST).headers == {"a": "1"}


def test_a_block_without_the_table_is_remembered_when_the_table_changes() -> None:
    decoder = BlockDecoder(REQUEST_PSEUDO_HEADERS)
    literal = b"\x00\x01c\x013"
    block = decoder.decode(literal)
    decoder.decode(ADD_A)
    assert decoder.decode(literal) is block
    assert block.encoded == literal
