"""The TLS and token arguments of clients."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from tests.security.authority import Authority

import bngrad
from bngrad import aio
from bngrad._credentials import Credentials, Security, check_security

REMOTE = ["10.0.0.1:1", "host.example:1", "dns:///host.example:1", "ipv4:10.0.0.1:1", "[2001:db8::1]:1", "0.0.0.0:1"]
LOCAL = ["127.0.0.1:1", "localhost:1", "[::1]:1", "unix:/a", "unix-abstract:a", "dns:localhost:1"]
TOKEN = "bngrad_secret"  # noqa: S105 - used nowhere else


@pytest.mark.parametrize("target", REMOTE)
def test_a_token_is_not_sent_to_other_hosts_unencrypted(target: str) -> None:
    for client in (bngrad.Client, aio.Client):
        with pytest.raises(bngrad.InvalidArgumentError, match="the token would travel unencrypted to") as refused:
            client(["localhost:1", target], token=TOKEN)
        assert refused.value.violations[0].field == "token"
        assert TOKEN not in str(refused.value)


@pytest.mark.parametrize("target", REMOTE)
def test_a_token_is_sent_to_other_hosts_with_tls_or_insecure(target: str) -> None:
    for client in (bngrad.Client, aio.Client):
        client(target, token=TOKEN, insecure=True)
        client(target, token=TOKEN, tls=True)


@pytest.mark.parametrize("target", LOCAL)
def test_a_token_may_be_sent_unencrypted_on_this_host(target: str) -> None:
    bngrad.Client(target, token=TOKEN).close()


@pytest.mark.parametrize("token", ["", "two words", "line\nbreak", "é", "nul\0"])
def test_a_token_must_fit_in_a_header(token: str, tmp_path: Path) -> None:
    with pytest.raises(bngrad.InvalidArgumentError, match="token must be printable ASCII without blanks") as refused:
        bngrad.Client("localhost:1", token=token)
    assert not token or token not in str(refused.value)
    with (
        bngrad.Client("localhost:1", token=lambda: token) as client,
        pytest.raises(bngrad.InvalidArgumentError, match="token must be printable ASCII"),
    ):
        client.server_info()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"token": 5}, "token must be a str, a path or a callable, not int"),
        ({"token": b"abc"}, "token must be a str, a path or a callable, not bytes"),
        ({"tls": "ca.pem"}, "tls must be a bool or a bngrad.Tls, not str"),
        ({"tls": None}, "tls must be a bool or a bngrad.Tls, not NoneType"),
    ],
)
def test_arguments_of_other_types_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        bngrad.Client("localhost:1", **arguments)


def test_a_token_comes_from_a_string_a_file_or_a_function(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    for token in (TOKEN, path, lambda: TOKEN):
        assert Credentials(check_security(["a:1"], True, token, False), "unix:/a").authorization() == f"Bearer {TOKEN}"
    credentials = Credentials(Security(token=path), "unix:/a")
    path.write_text("another")
    assert credentials.metadata() == (("authorization", "Bearer another"),)
    path.unlink()
    with pytest.raises(bngrad.InvalidArgumentError, match="token must be a file that can be read"):
        credentials.metadata()
    assert Credentials(Security(), "a:1").metadata() == ()


def test_no_repr_shows_the_token() -> None:
    assert TOKEN not in repr(Security(token=TOKEN))
    with bngrad.Client("localhost:1", token=TOKEN) as client:
        assert TOKEN not in repr(client)


def test_unusable_files_are_named(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair, other = authority.issue("alice@work.example"), authority.issue("bob@work.example")
    nonsense = tmp_path / "nonsense"
    nonsense.write_text("nonsense")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"ca": tmp_path / "nothing"}, "tls.ca"),
        ({"ca": "\ud800"}, "tls.ca"),
        ({"ca": "a\0b"}, "tls.ca"),
        ({"ca": nonsense}, "tls.ca"),
        ({"certificate": pair.certificate}, "tls"),
        ({"key": pair.key}, "tls"),
        ({"certificate": pair.certificate, "key": other.key}, "tls.certificate"),
        ({"certificate": nonsense, "key": pair.key}, "tls.certificate"),
        ({"certificate": pair.certificate, "key": tmp_path / "nothing"}, "tls.key"),
    ]
    for arguments, field in cases:
        with pytest.raises(bngrad.InvalidArgumentError, match=r"^tls") as refused:
            bngrad.Tls(**arguments)
        assert refused.value.violations[0].field == field
    assert pickle.loads(pickle.dumps(bngrad.Tls(authority.path))) == bngrad.Tls(authority.path)  # noqa: S301
