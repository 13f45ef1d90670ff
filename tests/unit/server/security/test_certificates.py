"""Certificate files, and the names in clients' certificates."""

from __future__ import annotations

import shutil
import socket
import ssl
from pathlib import Path

import pytest
from tests.security.authority import HOSTS, Authority, Pair
from tests.servers import wait_until

from bngrad_server.security.certificates import Certificates, client_of_socket


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def shake_hands(certificates: Certificates, authority: Authority, pair: Pair | None) -> tuple[str, str]:
    """Connects a client; returns its name for the server, and the server's certificate."""
    context = ssl.create_default_context(cafile=authority.path)
    context.check_hostname = False
    if pair is not None:
        context.load_cert_chain(pair.certificate, pair.key)
    here, there = socket.socketpair()
    with (
        certificates.context.wrap_socket(there, server_side=True, do_handshake_on_connect=False) as server,
        context.wrap_socket(here, do_handshake_on_connect=False) as client,
    ):
        for each in (client, server):
            each.setblocking(False)
        _both(client, server)
        shown = client.getpeercert(binary_form=True)
        assert shown is not None
        return client_of_socket(server, "default"), ssl.DER_cert_to_PEM_cert(shown)


def _both(*ends: ssl.SSLSocket) -> None:
    left = list(ends)
    while left:
        for end in list(left):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            left.remove(end)


@pytest.mark.parametrize(
    ("names", "common_name", "client"),
    [
        (("alice@work.example",), None, "certificate alice@work.example"),
        (("alice@work.example",), "alice", "certificate alice"),
        (("host.example", "10.0.0.1"), None, "certificate host.example"),
    ],
)
def test_a_certificate_names_its_client(
    authority: Authority, names: tuple[str, ...], common_name: str | None, client: str
) -> None:
    own = authority.issue(*HOSTS)
    certificates = Certificates(own.certificate, own.key, authority.path)
    pair = authority.issue(*names, common_name=common_name)
    assert shake_hands(certificates, authority, pair)[0] == client


def test_without_client_authorities_no_certificate_is_asked_for(authority: Authority) -> None:
    own = authority.issue(*HOSTS)
    certificates = Certificates(own.certificate, own.key, None)
    client, shown = shake_hands(certificates, authority, authority.issue("alice@work.example"))
    assert client == "default"
    assert own.certificate.read_text().startswith(shown.strip())


def test_a_new_certificate_is_shown_once_it_has_its_key(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = authority.issue(*HOSTS), authority.issue("other.example")
    live = Pair(tmp_path / "live.pem", tmp_path / "live.key")
    shutil.copy(first.certificate, live.certificate)
    shutil.copy(first.key, live.key)
    certificates = Certificates(live.certificate, live.key, None)
    before = certificates.context
    shutil.copy(second.certificate, live.certificate)
    wait_until(lambda: certificates.context is before and "so the old content stays in use" in caplog.text)
    shutil.copy(second.key, live.key)
    wait_until(lambda: certificates.context is not before)
    shown = shake_hands(certificates, authority, None)[1]
    assert second.certificate.read_text().startswith(shown.strip())


def test_authorities_may_be_named_in_any_language(authority: Authority, tmp_path: Path) -> None:
    alice, named = authority.issue("alice"), tmp_path / "named.pem"
    named.write_text(f"# AC Raíz Certicámara\n{authority.path.read_text()}", encoding="utf-8")
    own = authority.issue(*HOSTS)
    assert shake_hands(Certificates(own.certificate, own.key, named), authority, alice)[0] == "certificate alice"


def test_an_error_names_the_file_with_the_wrong_content(authority: Authority, tmp_path: Path) -> None:
    own, other = authority.issue(*HOSTS), authority.issue("other.example")
    nonsense = tmp_path / "nonsense"
    nonsense.write_text("nonsense")
    empty = tmp_path / "empty"
    empty.touch()
    for paths, message in (
        ((own.certificate, other.key, None), f"{other.key} are not a certificate and its key"),
        ((nonsense, own.key, None), f"{nonsense} and .* are not a certificate"),
        ((own.certificate, own.key, nonsense), f"{nonsense} has no certificate of an authority"),
        ((own.certificate, own.key, empty), f"{empty} has no certificate of an authority"),
    ):
        with pytest.raises(ValueError, match=message):
            Certificates(*paths)
    with pytest.raises(FileNotFoundError):
        Certificates(tmp_path / "nothing", own.key, None)
