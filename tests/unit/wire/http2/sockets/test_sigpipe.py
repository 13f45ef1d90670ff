"""Programs that have SIGPIPE at its default, in processes of their own: it would end them."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from bngrad_wire.http2.sockets import sigpipe

ROOT = Path(__file__).parents[5]
_SEND = """
import contextlib, pathlib, signal, socket, sys
from bngrad_wire.http2 import PeerGoneError
from bngrad_wire.http2.sockets.buffered_socket import BufferedSocket
from tests.unit.wire.http2.sockets.test_tls import make_contexts, pair

@contextlib.contextmanager
def plain():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        yield listener.accept()[0], near

kind, folder = sys.argv[1:]
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
with pair(make_contexts(pathlib.Path(folder))) if kind == "tls" else plain() as (there, here):
    buffered = BufferedSocket(here)
    if kind == "lent":
        buffered.expect_large_messages(are_kept=True)
    buffered.set_timeout(30)
    there.close()
    try:
        while True:
            buffered.send([bytes(4 * 2**20)])
    except PeerGoneError:
        print("gone", buffered.has_lent)
    buffered.close(b"bye")
"""


@pytest.mark.parametrize("kind", ["copied", "lent", "tls"])
def test_a_peer_that_has_gone_is_an_error_in_programs_that_do_not_ignore_sigpipe(kind: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", _SEND, kind, str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, f"gone {kind == 'lent'}\n"), ended.stderr


def test_a_signal_that_was_held_back_does_not_come_later() -> None:
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        with sigpipe.held_back():
            signal.pthread_kill(threading.get_ident(), signal.SIGPIPE)
        assert signal.SIGPIPE not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    finally:
        signal.signal(signal.SIGPIPE, before)
