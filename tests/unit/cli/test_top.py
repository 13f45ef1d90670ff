"""``bngrad top`` in a terminal of 80 columns and 24 lines."""

from __future__ import annotations

import fcntl
import http.server
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

FAILURE = {
    "time": 99.0, "code": "UNAVAILABLE", "client": "process 7", "request_id": "0123",
    "message": "it broke" + " and more" * 20,
}  # fmt: skip
STATUS: dict[str, Any] = {
    "server": {
        "version": "1.2.3",
        "time": 100.0,
        "started_at": 0.0,
        "ready": True,
        "stopping": False,
        "queue": {"requests": 0},
        "in_flight": 0,
        "arena": {"used": 0, "bytes": 1},
        "devices": [
            {"name": f"cpu:{k}", "state": "ready", "resident_bytes": 0, "restarts": 0, "description": "a CPU " * 20}
            for k in range(4)
        ],
        "failures": [FAILURE] * 5,
    },
    "points": [],
    "recent": {
        "p50": 1.0, "p90": 1.0, "p99": 1.0, "stages": {"queue": 1.0}, "counts": [1], "first_bound": 1e-3,
    },
}  # fmt: skip


class _Status(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(STATUS).encode())

    def log_message(self, *arguments: Any) -> None: ...


@pytest.fixture
def address() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Status) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_narrow_output_of_any_encoding_has_the_numbers(address: str, encoding: str) -> None:
    command = [sys.executable, "-m", "bngrad_cli", "top", address, "--once"]
    environment = os.environ | {"COLUMNS": "40", "PYTHONIOENCODING": encoding}
    ended = subprocess.run(command, env=environment, capture_output=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, b"")
    names = "requests/s failed/s tensors/s median 99 % waiting in flight arena"
    assert names in " ".join(ended.stdout.decode(encoding).replace("|", " ").split())


def read_until(terminal: int, words: str) -> str:
    text, deadline = "", time.monotonic() + 60
    while words not in text:
        assert select.select([terminal], [], [], max(deadline - time.monotonic(), 0))[0], text
        text += os.read(terminal, 1 << 16).decode(errors="replace")
    return text


def test_a_small_terminal_shows_failures_and_q_ends_it(address: str) -> None:
    terminal, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    command = [sys.executable, "-m", "bngrad_cli", "top", address, "--interval", "1000"]
    # A process of its own session, whose controlling terminal is this one; its size, not COLUMNS, counts.
    start = "import os, sys; os.setsid(); os.open(os.ttyname(0), os.O_RDWR); os.execv(sys.argv[1], sys.argv[1:])"
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")} | {"TERM": "xterm"}
    files = [(os.POSIX_SPAWN_DUP2, inner, fd) for fd in (0, 1, 2)]
    process = os.posix_spawn(sys.executable, [sys.executable, "-c", start, *command], environment, file_actions=files)
    os.close(inner)
    screen = read_until(terminal, "q to quit")
    assert screen.count("it broke") == 5
    assert screen.count("cpu:") == 4
    os.write(terminal, b"q")
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    os.close(terminal)
