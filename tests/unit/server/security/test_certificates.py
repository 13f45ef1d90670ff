"""Certificate files, and the names in clients' certificates."""

from __future__ import annotations

import shutil
import socket
import ssl
from pathlib import Path

import pytest
from tests.integration.conftest import wait_until
from tests.security.authority import HOSTS, Authority, Pair

from bngrad_server.security.certificates import CertificatePaths, Certificates, client_of_socket


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def shake_hands(certificates: Certificates, authority: Authority, pair: Pair | None) -> tuple[str, str]:
    """Connects a client; gives whom the server takes it for, and who issued what the server shows."""
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
        return client_of_socket(server, "a stranger"), ssl.DER_cert_to_PEM_cert(shown)


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
def test_a_client_is_who_its_certificate_says(
    authority: Authority, names: tuple[str, ...], common_name: str | None, client: str
) -> None:
    own = authority.issue(*HOSTS)
    certificates = Certificates(CertificatePaths(own.certificate, own.key, authority.path))
    pair = authority.issue(*names, common_name=common_name)
    assert shake_hands(certificates, authority, pair)[0] == client


def test_without_client_authorities_nobody_is_asked(authority: Authority) -> None:
    own = authority.issue(*HOSTS)
    certificates = Certificates(CertificatePaths(own.certificate, own.key, None))
    client, shown = shake_hands(certificates, authority, authority.issue("alice@work.example"))
    assert client == "a stranger"
    assert own.certificate.read_text().startswith(shown.strip())


def test_a_new_certificate_is_shown_once_it_has_its_key(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = authority.issue(*HOSTS), authority.issue("other.example")
    live = Pair(tmp_path / "live.pem", tmp_path / "live.key")
    shutil.copy(first.certificate, live.certificate)
    shutil.copy(first.key, live.key)
    certificates = Certificates(CertificatePaths(live.certificate, live.key, None))
    before = certificates.context
    shutil.copy(second.certificate, live.certificate)
    wait_until(lambda: certificates.context is before and "so what was there before still holds" in caplog.text)
    shutil.copy(second.key, live.key)
    wait_until(lambda: certificates.context is not before)
    shown = shake_hands(certificates, authority, None)[1]
    assert second.certificate.read_text().startswith(shown.strip())


def test_files_that_are_no_certificates_are_named(authority: Authority, tmp_path: Path) -> None:
    own, other = authority.issue(*HOSTS), authority.issue("other.example")
    nonsense = tmp_path / "nonsense"
    nonsense.write_text("nonsense")
    for paths, message in (
        (CertificatePaths(own.certificate, other.key, None), f"{other.key} are no certificate with its key"),
        (CertificatePaths(nonsense, own.key, None), f"{nonsense} and .* are no certificate"),
        (CertificatePaths(own.certificate, own.key, nonsense), f"{nonsense} has no certificates of authorities"),
    ):
        with pytest.raises(ValueError, match=message):
            Certificates(paths)
    with pytest.raises(FileNotFoundError):
        Certificates(CertificatePaths(tmp_path / "nothing", own.key, None))
