"""The commands against a server that requires a certificate and a token."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.security.authority import HOSTS, Authority
from tests.security.conftest import Guarded
from tests.servers import run_bngrad


@pytest.fixture
def known(guarded: Guarded, tmp_path: Path) -> tuple[str, ...]:
    """The options with alice's certificate and token."""
    token = tmp_path / "token"
    token.write_text(f"{guarded.token}\n")
    pair = ("--tls-certificate", str(guarded.alice.certificate), "--tls-key", str(guarded.alice.key))
    return ("--tls-ca", str(guarded.authority.path), *pair, "--token-file", str(token), "--timeout", "60")


@pytest.mark.parametrize("command", [("check",), ("check", "--quick"), ("info",)], ids=" ".join)
def test_a_known_user_is_answered(guarded: Guarded, known: tuple[str, ...], command: tuple[str, ...]) -> None:
    ended = run_bngrad(*command, *known, guarded.server.target)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert guarded.token not in ended.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (6, "answered UNAUTHENTICATED: a valid token is needed"),
        (2, "is not reached by TLS: if it asks for certificates, give --tls-certificate: "),
        (0, "speaks TLS, and this command did not: give --tls or --tls-ca"),
    ],
)
def test_missing_credentials_are_named(guarded: Guarded, known: tuple[str, ...], options: int, message: str) -> None:
    ended = run_bngrad("check", "--timeout", "60", *known[:options], guarded.server.target)
    assert ended.returncode == 1
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("names", "expired", "hint"),
    [
        (("other.example",), False, "its certificate is for other names: "),
        (HOSTS, True, "its certificate has expired, or the clock here is wrong: "),
    ],
)
def test_a_servers_certificate_is_refused_with_the_reason(
    tmp_path: Path, names: tuple[str, ...], expired: bool, hint: str
) -> None:
    guarded = Guarded(tmp_path, client_ca=False)
    guarded.show(guarded.authority.issue(*names, expired=expired))
    with guarded.running():
        ended = run_bngrad("check", "--tls-ca", str(guarded.authority.path), "--timeout", "60", guarded.server.target)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert f"{guarded.server.target} is not reached by TLS: {hint}" in ended.stderr


def test_a_token_that_only_ops_need_is_asked_for_by_its_option(tmp_path: Path) -> None:
    guarded = Guarded(tmp_path, client_ca=False, options=("--open-health",))
    with guarded.running():
        ended = run_bngrad("check", "--tls-ca", str(guarded.authority.path), "--timeout", "60", guarded.server.target)
    assert ended.returncode == 1
    assert "answered UNAUTHENTICATED: a valid token is needed; give --token-file" in ended.stderr + ended.stdout


def test_a_certificate_that_the_server_does_not_know_is_named(
    guarded: Guarded, known: tuple[str, ...], tmp_path: Path
) -> None:
    other = Authority(tmp_path, "unknown").issue("alice")
    pair = ("--tls-certificate", str(other.certificate), "--tls-key", str(other.key))
    ended = run_bngrad("check", *known[:2], *pair, "--timeout", "60", guarded.server.target)
    assert ended.returncode == 1
    assert f"it may know no authority that has signed {other.certificate}: " in ended.stderr


def test_an_invalid_token_is_named_and_not_waited_for(guarded: Guarded, known: tuple[str, ...], tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("wrong\n")
    arguments = (*known[:6], "--token-file", str(wrong), "--timeout", "60", "--wait", "600")
    ended = run_bngrad("check", *arguments, guarded.server.target)
    assert ended.returncode == 1
    assert f"answered UNAUTHENTICATED: a valid token is needed; that of {wrong} is not" in ended.stderr


def test_a_token_is_not_sent_to_other_hosts_in_the_clear(known: tuple[str, ...]) -> None:
    for arguments in (("check", "--quick"), ("info",)):
        ended = run_bngrad(*arguments, *known[6:8], "192.0.2.1:1", "--timeout", "0.1")
        assert ended.returncode == 1
        assert "the token would travel unencrypted to 192.0.2.1:1" in ended.stderr


def test_a_certificate_needs_its_key(known: tuple[str, ...]) -> None:
    ended = run_bngrad("info", *known[2:4])
    assert ended.returncode == 2
    assert "--tls-certificate and --tls-key need each other" in ended.stderr


@pytest.mark.parametrize("option", ["--tls-ca", "--token-file"])
def test_a_file_that_is_missing_is_a_wrong_command_line(tmp_path: Path, option: str) -> None:
    ended = run_bngrad("check", option, f"{tmp_path}/missing")
    assert ended.returncode == 2
    assert f"Invalid value for '{option}': File '{tmp_path}/missing' does not exist" in ended.stderr


@pytest.mark.parametrize("content", ["", "one\ntwo\n", "name sha256:0123", "\0"])
@pytest.mark.parametrize("command", ["check", "info"])
def test_a_file_without_exactly_one_token_is_refused(tmp_path: Path, command: str, content: str) -> None:
    token = tmp_path / "token"
    token.write_text(content)
    ended = run_bngrad(command, "--token-file", str(token))
    assert (ended.returncode, ended.stdout) == (1, "")
    assert f"{token}, the file of --token-file, should hold one token" in ended.stderr
