"""Files that decide who may call, and that other users of the host may read or change."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tests.security.authority import HOSTS, Authority
from tests.servers import wait_until

from bngrad_server.security.certificates import Certificates
from bngrad_server.security.tokens import Tokens
from bngrad_wire.token_format import new_token

FILES = ("certificate", "key", "client_ca", "tokens")
PRIVATE = ("key", "tokens")
Files = dict[str, tuple[Path, Callable[[], object]]]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """Each file, for its owner alone, and what reads it."""
    authority = Authority(tmp_path)
    own = authority.issue(*HOSTS)
    tokens = tmp_path / "tokens"
    tokens.write_text(new_token("alice")[1])
    certificates = partial(Certificates, own.certificate, own.key, authority.path)
    paths = (own.certificate, own.key, authority.path)
    for path in (*paths, tokens):
        path.chmod(0o600)
    return {
        **{name: (path, certificates) for name, path in zip(FILES, paths, strict=False)},
        "tokens": (tokens, partial(Tokens, tokens)),
    }


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("mode", [0o666, 0o602, 0o622])
def test_a_file_that_every_user_may_change_is_refused(files: Files, name: str, mode: int) -> None:
    path, read = files[name]
    path.chmod(mode)
    with pytest.raises(
        ValueError, match=rf"{path} has mode {mode:04o}, so every user .* change it.* chmod o-rw {path}"
    ):
        read()


@pytest.mark.parametrize("name", FILES)
def test_a_pipe_is_refused_rather_than_waited_for(files: Files, name: str) -> None:
    path, read = files[name]
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(ValueError, match=f"{path} is no regular file"):
        read()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("mode", [0o644, 0o604])
def test_of_a_secret_that_every_user_may_read_the_log_warns(
    files: Files, name: str, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    path, read = files[name]
    path.chmod(mode)
    read()
    found = f"{path} has mode {mode:04o}, so every user of this host may read it; it should have mode"
    assert (found in caplog.text) == (name in PRIVATE)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("mode", [0o600, 0o400, 0o440, 0o640, 0o660])
def test_files_for_owner_and_group_are_read_in_silence(
    files: Files, name: str, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    path, read = files[name]
    path.chmod(mode)
    read()
    assert caplog.text == ""


@pytest.mark.parametrize("mode", [0o440, 0o666])
def test_of_a_link_the_target_counts(files: Files, tmp_path: Path, mode: int) -> None:
    """As in a volume of Kubernetes, where the file is a link by way of a link to a folder."""
    path, _ = files["tokens"]
    (tmp_path / "..2026").mkdir()
    path = path.rename(tmp_path / "..2026" / "tokens")
    (tmp_path / "..data").symlink_to("..2026")
    (tmp_path / "tokens").symlink_to("..data/tokens")
    path.chmod(mode)
    if mode == 0o666:
        with pytest.raises(ValueError, match="has mode 0666"):
            Tokens(tmp_path / "tokens")
    else:
        Tokens(tmp_path / "tokens")


def test_tokens_that_anyone_may_have_added_to_a_file_in_use_are_not_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tokens"
    (alice, line), (eve, other) = new_token("alice"), new_token("eve")
    path.write_text(line)
    path.chmod(0o600)
    tokens = Tokens(path)
    path.chmod(0o666)
    path.write_text(f"{line}\n{other}")
    wait_until(lambda: tokens.owner(f"Bearer {eve}") is None and "so the old content stays in use" in caplog.text)
    assert tokens.owner(f"Bearer {alice}") == "alice"
    path.chmod(0o600)  # by its owner, who has looked at it
    wait_until(lambda: tokens.owner(f"Bearer {eve}") == "eve")
