"""TLS on both TCP ports: which certificates and versions are accepted."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.security.authority import HOSTS, Authority, Pair
from tests.security.conftest import Guarded, ask
from tests.servers import TRANSPORTS, Transport, wait_until

import bngrad
from bngrad_wire.http2 import frames
from bngrad_wire.token_format import new_token

_LOST = "Both sides must use TLS, or neither; a server may also ask for a bngrad.Tls(certificate=..., key=...)."
_HELLO = frames.PREFACE + frames.settings({})


def context(authority: Authority, pair: Pair | None = None) -> ssl.SSLContext:
    made = ssl.create_default_context(cafile=authority.path)
    made.set_alpn_protocols(["h2"])
    if pair is not None:
        made.load_cert_chain(pair.certificate, pair.key)
    return made


def hear(place: tuple[str, int], how: ssl.SSLContext | None, session: ssl.SSLSession | None = None) -> bytes:
    """Returns the server's answer to an HTTP/2 preface; empty if it refuses or ends the connection."""
    heard = b""
    with suppress(OSError), socket.create_connection(place, 60) as plain, wrapped(plain, how, session) as sock:
        sock.sendall(_HELLO)
        while len(heard) < frames.HEADER_NBYTES and (said := sock.recv(2**16)):
            heard += said
    return heard


def wrapped(sock: socket.socket, how: ssl.SSLContext | None, session: ssl.SSLSession | None = None) -> socket.socket:
    return sock if how is None else how.wrap_socket(sock, server_hostname=sock.getpeername()[0], session=session)


def is_greeted(heard: bytes) -> bool:
    return len(heard) >= frames.HEADER_NBYTES and frames.parse_header(heard, 0)[1] == frames.SETTINGS


def too_old(version: ssl.TLSVersion) -> ssl.SSLContext:
    """Returns a context limited to this version; old versions need old ciphers."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
    made.set_ciphers("ALL:@SECLEVEL=0")
    made.minimum_version = ssl.TLSVersion.TLSv1
    made.maximum_version = version
    return made


def test_a_client_with_a_certificate_is_accepted(guarded: Guarded) -> None:
    assert is_greeted(hear(guarded.port, context(guarded.authority, guarded.alice)))


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_both_versions_of_tls_are_accepted(guarded: Guarded, version: ssl.TLSVersion) -> None:
    how = context(guarded.authority, guarded.alice)
    how.minimum_version = how.maximum_version = version
    assert is_greeted(hear(guarded.port, how))


@pytest.mark.parametrize("who", ["nobody", "expired", "somebody else's", "self-made", "plain", "TLS 1.0", "TLS 1.1"])
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_other_clients_are_refused(guarded: Guarded, who: str, tmp_path: Path) -> None:
    alice, other = "alice@work.example", Authority(tmp_path, "other")
    how: dict[str, Callable[[], ssl.SSLContext | None]] = {
        "nobody": lambda: context(guarded.authority),
        "expired": lambda: context(guarded.authority, guarded.authority.issue(alice, expired=True)),
        "somebody else's": lambda: context(guarded.authority, other.issue(alice)),
        "self-made": lambda: context(guarded.authority, Authority(tmp_path, "authority").issue(alice)),
        "plain": lambda: None,
        "TLS 1.0": lambda: too_old(ssl.TLSVersion.TLSv1),
        "TLS 1.1": lambda: too_old(ssl.TLSVersion.TLSv1_1),
    }
    assert not is_greeted(hear(guarded.port, how[who]()))


def test_garbage_within_tls_ends_the_connection(guarded: Guarded) -> None:
    place, how = guarded.port, context(guarded.authority, guarded.alice)
    with socket.create_connection(place, 60) as plain, wrapped(plain, how) as sock:
        os.write(sock.fileno(), b"\x17\x03\x03\x00\x20" + bytes(32))  # a record that is not encrypted
        with suppress(OSError):
            while sock.recv(2**16):
                pass
    assert "Decryption error" not in guarded.server.stderr()


def refusal(guarded: Guarded, **arguments: Any) -> str:
    """Returns why a client cannot connect."""
    with guarded.client(retries=False, **arguments) as client, pytest.raises(bngrad.UnavailableError) as refused:
        ask(client)
    return str(refused.value)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_client_accepts_no_other_server(guarded: Guarded, transport: Transport, tmp_path: Path) -> None:
    own = guarded.alice
    unknown = bngrad.Tls(Authority(tmp_path, "unknown").path, own.certificate, own.key)
    signed = "OK. bngrad.Tls(ca=...) should name the authority that has signed its certificate."
    assert refusal(guarded, tls=unknown, transport=transport).endswith(signed)
    elsewhere = bngrad.Tls(guarded.authority.path, own.certificate, own.key, server_name="other.example")
    named = "Check failed. Its certificate is for other names; see bngrad.Tls(server_name=...)."
    assert refusal(guarded, tls=elsewhere, transport=transport).endswith(named)
    assert refusal(guarded, tls=True, transport=transport)
    assert refusal(guarded, tls=False, transport=transport).endswith(_LOST)
    assert refusal(guarded, tls=bngrad.Tls(guarded.authority.path), transport=transport).endswith(_LOST)


@pytest.mark.parametrize("transport", ["auto", "stream", "unary"])
def test_a_handshake_that_the_server_breaks_off_is_tried_again(guarded: Guarded, transport: Transport) -> None:
    """It is there, but may have no place for another connection."""
    accepted = 0

    def break_off(listener: socket.socket) -> None:
        nonlocal accepted
        with suppress(OSError):
            while True:
                sock, _ = listener.accept()
                accepted += 1
                with sock:
                    sock.recv(2**16)

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as threads, ExitStack() as stack:
        stack.callback(listener.shutdown, socket.SHUT_RDWR)
        threads.submit(break_off, listener)
        target = f"127.0.0.1:{listener.getsockname()[1]}"
        client = stack.enter_context(guarded.client(target, transport=transport))
        with pytest.raises(bngrad.UnavailableError, match=r"\d+ attempts in"):
            ask(client, timeout=3)
    assert accepted > 1


@pytest.mark.parametrize("transport", ["stream", "unary"])
@pytest.mark.parametrize("place", ["file", "directory", "both"])
def test_the_client_accepts_servers_that_the_system_trusts(
    guarded: Guarded, place: str, transport: Transport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Authority(tmp_path, "other").path
    directory = tmp_path / "certificates"
    directory.mkdir()
    (directory / "README").write_text("no certificate")
    if place != "file":
        shutil.copy(guarded.authority.path, directory / f"{hash_of(guarded.authority.path)}.0")
    monkeypatch.setenv("SSL_CERT_DIR", str(directory))
    monkeypatch.setenv("SSL_CERT_FILE", str({"file": guarded.authority.path, "directory": "", "both": other}[place]))
    trusting = bngrad.Tls(certificate=guarded.alice.certificate, key=guarded.alice.key)
    with guarded.client(tls=trusting, transport=transport) as client:
        ask(client)


def hash_of(certificate: Path) -> str:
    """Returns the name that OpenSSL gives a certificate in a directory of authorities."""
    command = ["openssl", "x509", "-noout", "-hash", "-in", str(certificate)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def wait_until_greeted(guarded: Guarded, how: ssl.SSLContext, *, greeted: bool = True) -> None:
    place = guarded.port
    wait_until(lambda: is_greeted(hear(place, how)) == greeted)


def test_an_expired_certificate_is_refused_and_replaced_without_restart(own_guarded: Guarded) -> None:
    guarded = own_guarded
    how = context(guarded.authority, guarded.alice)
    with guarded.client() as client:
        ask(client)
        wait_until_greeted(guarded, how)
        guarded.show(guarded.authority.issue(*HOSTS, expired=True))
        wait_until_greeted(guarded, how, greeted=False)
        assert refusal(guarded, transport="stream").endswith("Its certificate has expired, or the clock here is wrong.")
        ask(client)  # on the connection that it has
    guarded.show(guarded.authority.issue(*HOSTS))
    wait_until_greeted(guarded, how)
    with guarded.client() as client:
        ask(client)


def test_the_client_authority_is_replaced_without_restart(own_guarded: Guarded, tmp_path: Path) -> None:
    guarded, other = own_guarded, Authority(tmp_path, "other")
    before = context(guarded.authority, guarded.alice)
    after = context(guarded.authority, other.issue("bob@work.example"))
    before.maximum_version = ssl.TLSVersion.TLSv1_2  # whose sessions are there at once
    with wrapped(socket.create_connection(guarded.port, 60), before) as sock:
        assert isinstance(sock, ssl.SSLSocket)
        session = sock.session
    with wrapped(socket.create_connection(guarded.port, 60), before) as held:
        held.sendall(_HELLO)
        assert is_greeted(held.recv(2**16))
        guarded.accept(other)
        wait_until_greeted(guarded, after)
        assert not is_greeted(hear(guarded.port, before))
        assert not is_greeted(hear(guarded.port, before, session))
        while held.recv(2**16):  # the connection of one who is accepted no more ends
            pass


def test_tokens_are_replaced_without_restart(own_guarded: Guarded) -> None:
    guarded = own_guarded
    token, line = new_token("bob")

    def is_known(client: bngrad.Client) -> bool:
        try:
            ask(client)
        except bngrad.UnauthenticatedError:
            return False
        return True

    with guarded.client() as alice, guarded.client(token=token) as bob:
        assert is_known(alice)
        assert not is_known(bob)
        guarded.know(line)
        wait_until(lambda: is_known(bob))
        assert not is_known(alice)
