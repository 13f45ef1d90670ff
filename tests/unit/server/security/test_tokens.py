"""The token file."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.servers import wait_until

from bngrad_server.security.tokens import Tokens
from bngrad_wire.token_format import new_token


def replace(path: Path, text: str) -> None:
    draft = path.with_suffix(".new")
    draft.write_text(text)
    draft.rename(path)


def test_a_token_names_its_owner(tmp_path: Path) -> None:
    made = [new_token(name) for name in ("alice", "bob@work", "c-3.po_")]
    path = tmp_path / "tokens"
    path.write_text("# ours\n\n" + "".join(f"  {line}  # {line[:3]}\n" for _, line in made))
    tokens = Tokens(path)
    assert [tokens.owner(f"Bearer {token}") for token, _ in made] == ["alice", "bob@work", "c-3.po_"]
    for header in (f"bearer {made[0][0]}", f"Bearer  {made[0][0]} "):
        assert tokens.owner(header) == "alice"


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer ", "Basic {}", "{}", "Bearer {}x", "Bearer x{}", "Bearer {} {}", "Bearer \udcff"],
)
def test_other_headers_have_no_owner(tmp_path: Path, authorization: str | None) -> None:
    token, line = new_token("alice")
    path = tmp_path / "tokens"
    path.write_text(line)
    assert Tokens(path).owner(authorization and authorization.replace("{}", token)) is None


def test_a_hash_is_no_token(tmp_path: Path) -> None:
    _, line = new_token("alice")
    path = tmp_path / "tokens"
    path.write_text(line)
    assert Tokens(path).owner(f"Bearer {line.partition(':')[2]}") is None


@pytest.mark.parametrize(
    "text",
    [
        *("alice", "alice sha256:12", "alice md5:" + "0" * 64, "a b sha256:" + "0" * 64, "- sha256:" + "0" * 64),
        "alice sha256:" + "0" * 65,
    ],
)
def test_an_error_names_a_malformed_line_without_quoting_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"{new_token('alice')[1]}\n{text}\n")
    with pytest.raises(ValueError, match=f"line 2 of {path} must be NAME sha256:HASH") as refused:
        Tokens(path)
    assert "0000" not in str(refused.value)


def test_a_file_without_tokens_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "tokens"
    path.write_text("# none yet\n")
    path.chmod(0o600)
    Tokens(path)
    warning = f"{path} has no token, so every call is refused: add a line of `bngrad token new NAME`"
    assert [record.getMessage() for record in caplog.records] == [warning]


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Tokens(tmp_path / "tokens")


def test_a_changed_file_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (first, first_line), (second, second_line) = new_token("first"), new_token("second")
    path = tmp_path / "tokens"
    path.write_text(first_line)
    tokens = Tokens(path)
    replace(path, second_line)
    wait_until(lambda: tokens.owner(f"Bearer {second}") == "second")
    assert tokens.owner(f"Bearer {first}") is None
    replace(path, "nonsense")
    wait_until(lambda: tokens.owner(f"Bearer {second}") is not None and "cannot be used" in caplog.text)
    path.unlink()
    wait_until(lambda: tokens.owner(f"Bearer {second}") is not None and "No such file" in caplog.text)
    path.write_text("")
    wait_until(lambda: tokens.owner(f"Bearer {second}") is None)
