"""How tokens are made and written."""

from __future__ import annotations

import base64

import pytest

from bngrad_wire.token_format import hash_token, is_sendable, new_token, parse_line


def test_a_line_has_the_hash_of_its_token() -> None:
    token, line = new_token("alice")
    assert len(base64.urlsafe_b64decode(token.removeprefix("bngrad_") + "=")) == 32  # 256 bits, as are promised
    assert token not in line
    assert parse_line(line) == ("alice", hash_token(token))
    assert new_token("alice")[0] != token


@pytest.mark.parametrize("name", ["", "a b", "#a", "-a", "a" * 65, "é"])
def test_a_name_that_the_file_cannot_hold_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="a name must be"):
        new_token(name)


@pytest.mark.parametrize("token", ["", "a b", "a\n", "a\0", "é"])
def test_a_token_that_no_header_can_have_is_not_sendable(token: str) -> None:
    assert is_sendable(new_token("alice")[0])
    assert not is_sendable(token)
