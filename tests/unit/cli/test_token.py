"""``bngrad token new``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from bngrad_cli.main import main as command_line
from bngrad_server.security.tokens import Tokens


def run(*arguments: object) -> str:
    result = CliRunner().invoke(command_line, ["token", "new", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_token_and_its_line_are_printed(tmp_path: Path) -> None:
    printed = re.fullmatch(r"token, for alice alone: (\S+)\nline, for --token-file:  (.*)\n", run("alice"))
    assert printed is not None
    path = tmp_path / "tokens"
    path.write_text(printed[2])
    assert Tokens(path).owner(f"Bearer {printed[1]}") == "alice"


def test_the_line_is_appended_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    first = run("alice", "--token-file", path).strip()
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text(path.read_text().strip())
    second = run("bob", "--token-file", path).strip()
    tokens = Tokens(path)
    assert [tokens.owner(f"Bearer {each}") for each in (first, second)] == ["alice", "bob"]


def test_no_line_is_added_to_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_bytes(b"\xff")
    result = CliRunner().invoke(command_line, ["token", "new", "alice", "--token-file", str(path)])
    assert result.exit_code == 1
    assert result.output.startswith(f"Error: cannot add a line to {path}: it is no file of tokens: 'utf-8' codec")
    assert path.read_bytes() == b"\xff"


def test_a_full_disk_leaves_no_part_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("#" * 1000 + "\n")
    command = ["prlimit", "--fsize=1024", sys.executable, "-m", "bngrad_cli", "token", "new", "alice", "--token-file"]
    ended = subprocess.run([*command, str(path)], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == f"Error: cannot add a line to {path}: No space left on device\n"
    assert path.read_text() == "#" * 1000 + "\n"


def test_an_error_says_why(tmp_path: Path) -> None:
    for arguments, message in (
        (["a b"], "Invalid value for NAME: a name must be"),
        (["alice", "--token-file", tmp_path / "no" / "file"], "cannot add a line to .*: No such file"),
    ):
        result = CliRunner().invoke(command_line, ["token", "new", *map(str, arguments)])
        assert result.exit_code != 0
        assert re.search(message, result.output)


@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "writable by others"])
def test_no_line_goes_where_another_user_may_have_led_it(tmp_path: Path, kind: str) -> None:
    path, target = tmp_path / "tokens", tmp_path / "target"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "writable by others":
        path.touch()
        path.chmod(0o666)
    else:
        path.symlink_to(target)
        if kind == "link":
            target.touch()
    result = CliRunner().invoke(command_line, ["token", "new", "alice", "--token-file", str(path)])
    assert result.exit_code != 0
    reasons = {"pipe": "it is no regular file", "writable by others": rf"mode 0666.*chmod 600 {path}"}
    assert re.search(reasons.get(kind, "it is a symbolic link"), result.output)
    assert target.exists() == (kind == "link")
    assert kind == "pipe" or not (path.exists() and path.read_text())
