"""``bngrad top``: its screen, the terminals that it runs in, and its address."""

from __future__ import annotations

import contextlib
import fcntl
import http.server
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from bngrad_cli.commands.top import keys_pressed
from bngrad_cli.commands.top.screen import screen
from bngrad_cli.main import main as command_line

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
HINT = "start the server with --http HOST:PORT, and give that address here"


class _Status(http.server.BaseHTTPRequestHandler):
    code = 200
    body = json.dumps(STATUS)

    def do_GET(self) -> None:
        self.send_response(self.code)
        self.end_headers()
        self.wfile.write(self.body.encode())

    def log_message(self, *arguments: Any) -> None: ...


@pytest.fixture
def address() -> Iterator[str]:
    with answering(_Status) as address:
        yield address


@contextlib.contextmanager
def answering(handler: type[_Status]) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
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


@contextlib.contextmanager
def top_in_a_terminal(
    address: str, *options: str, is_controlling: bool = True, columns: int = 80
) -> Iterator[tuple[int, int]]:
    """Runs the command in a terminal of 24 lines; yields the terminal and the process id."""
    terminal, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
    command = [sys.executable, "-m", "bngrad_cli", "top", address, *options]
    # A process of its own session, whose controlling terminal is this one; its size, not COLUMNS, counts.
    # Where the tests run in the background of a script, SIGINT is ignored, and it would inherit that.
    start = """import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.setsid()
os.open(os.ttyname(0), os.O_RDWR | %s)
os.execv(sys.argv[1], sys.argv[1:])""" % ("0" if is_controlling else "os.O_NOCTTY")
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")} | {"TERM": "xterm"}
    files = [(os.POSIX_SPAWN_DUP2, inner, fd) for fd in (0, 1, 2)]
    process = os.posix_spawn(sys.executable, [sys.executable, "-c", start, *command], environment, file_actions=files)
    try:
        yield terminal, process
    finally:
        os.close(inner)
        os.close(terminal)


def exit_code(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


@pytest.mark.parametrize("is_controlling", [True, False])
def test_a_small_terminal_shows_failures_and_q_ends_it(address: str, is_controlling: bool) -> None:
    with top_in_a_terminal(address, "--interval", "1000", is_controlling=is_controlling) as (terminal, process):
        screen = read_until(terminal, "q to quit")
        assert screen.count("it broke") == 5
        assert screen.count("cpu:") == 4
        os.write(terminal, b"q")
        assert exit_code(process) == 0


def test_a_narrow_terminal_shows_the_whole_error_of_a_server_that_no_longer_answers() -> None:
    class Ending(_Status):
        pass

    with (
        answering(Ending) as address,
        top_in_a_terminal(address, "--interval", "0.1", columns=40) as (terminal, process),
    ):
        read_until(terminal, "q to quit")
        Ending.code, Ending.body = 503, "the server's front process does not answer"
        text = read_until(terminal, "cannot read") + read_until(terminal, "q to quit")
        os.write(terminal, b"q")
        assert exit_code(process) == 0
    assert re.search("front process +does not +answer", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|[│\s]+", " ", text))


def failures_shown(width: int, columns: int | None, failure: dict[str, Any]) -> str:
    status = STATUS | {"server": STATUS["server"] | {"failures": [failure]}}
    console = Console(width=width)
    with console.capture() as captured:
        console.print(screen("here", status, columns=columns))
    return captured.get()


@pytest.mark.parametrize(("columns", "request_id"), [(80, ""), (120, "0123456789abcdef")])
def test_a_line_of_a_failure_says_when_what_who_and_the_beginning_of_why(columns: int, request_id: str) -> None:
    failure = FAILURE | {"code": "RESOURCE_EXHAUSTED", "request_id": "0123456789abcdef"}
    text = failures_shown(columns, columns, failure)
    assert re.search(rf"1 s +RESOURCE_EXHAUSTED +process 7 +{request_id} *it broke and more .*…", text)


def test_long_names_of_clients_and_requests_hide_nothing_else() -> None:
    failure = FAILURE | {"client": "c" * 64, "request_id": "r" * 128}
    assert re.search("1 s +UNAVAILABLE +c+… +it broke", failures_shown(80, 80, failure))
    whole = failures_shown(80, None, failure)
    assert re.search("1 s +UNAVAILABLE +c+ +r+ +it broke", whole)
    assert "…" not in whole.split("device")[0]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_and_leaves_the_terminal_as_it_was(address: str, number: int, code: int) -> None:
    with top_in_a_terminal(address, "--interval", "1000") as (terminal, process):
        before = termios.tcgetattr(terminal)
        read_until(terminal, "q to quit")
        os.kill(process, number)
        read_until(terminal, "\x1b[?1049l")  # shows the screen that was there before
        assert exit_code(process) == code
        assert termios.tcgetattr(terminal) == before


def test_a_signal_whose_exception_python_dropped_ends_the_wait() -> None:
    dropped: list[int] = []

    def end(number: int, _: object) -> None:
        if dropped:
            raise KeyboardInterrupt
        dropped.append(number)

    before = signal.signal(signal.SIGUSR1, end)
    try:
        with keys_pressed() as keys:
            signal.raise_signal(signal.SIGUSR1)
            with pytest.raises(KeyboardInterrupt):
                keys.wait_for_q(60)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_without_a_terminal_the_screen_is_printed_once(address: str) -> None:
    command = [sys.executable, "-m", "bngrad_cli", "top", address]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith(f"bngrad 1.2.3 on {address}: ready")


@pytest.mark.parametrize(
    ("code", "body", "reason"),
    [
        (503, "the front process does not answer\n", "the front process does not answer"),
        (421, "it should be an address\n", "it should be an address"),
        (404, "<html>", f"Not Found; {HINT}"),
        (200, "{}", f"it is not an HTTP port of bngrad; {HINT}"),
        (200, "[]", f"it is not an HTTP port of bngrad; {HINT}"),
    ],
)
@pytest.mark.parametrize("option", ["--once", "--json"])
def test_an_answer_without_a_status_is_explained(code: int, body: str, reason: str, option: str) -> None:
    with answering(type("Handler", (_Status,), {"code": code, "body": body})) as address:
        result = CliRunner().invoke(command_line, ["top", address, option])
    assert (result.exit_code, result.output) == (1, f"Error: cannot read http://{address}/status.json: {reason}\n")


def test_a_proxy_of_the_environment_is_not_asked(address: str) -> None:
    command = [sys.executable, "-m", "bngrad_cli", "top", address, "--once"]
    environment = os.environ | {"http_proxy": "http://127.0.0.1:1", "no_proxy": ""}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    "address", ["", "host", "host:0", "host:65536", "unix:/socket", "http://", "http://host:x", "http://host:65536"]
)
def test_a_malformed_address_is_a_wrong_command_line(address: str) -> None:
    result = CliRunner().invoke(command_line, ["top", address])
    assert result.exit_code == 2
    assert "Invalid value for ADDRESS: it should be HOST:PORT or http://HOST:PORT" in result.output
    assert repr(address) in result.output
