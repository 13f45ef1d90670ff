"""The HTTP port: health, readiness, and clients that misuse it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from tests.monitoring.conftest import HTTP, call, get, http_of, status_of
from tests.servers import (
    ONE_WORKER,
    children_of,
    free_port,
    hold_new_workers,
    is_running,
    run_at_start,
    wait_until,
    worker_pid,
)

import bngrad
from bngrad_cli.embedded import EmbeddedServer, ServerStartError

CONNECTIONS = 400


def address_of(http: str) -> tuple[str, int]:
    host, _, port = http.removeprefix("http://").rpartition(":")
    return host, int(port)


def http_process(server: EmbeddedServer) -> psutil.Process:
    def running() -> list[psutil.Process]:
        return children_of(server.process.pid, "bngrad_server.monitor")

    wait_until(lambda: bool(running()))  # a thread of the server starts it
    (process,) = running()
    return process


def test_a_serving_server_is_alive_and_ready(http: str) -> None:
    assert get(f"{http}/healthz")[::2] == (200, "ok\n")
    assert get(f"{http}/readyz")[::2] == (200, "ok\n")


def test_without_a_worker_a_server_is_alive_but_not_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = hold_new_workers(tmp_path, monkeypatch)
    with EmbeddedServer(options=(*HTTP, *ONE_WORKER)) as server:
        http = http_of(server)
        gate.touch()
        os.kill(worker_pid(server), signal.SIGKILL)
        wait_until(lambda: get(f"{http}/readyz").status == 503)
        assert get(f"{http}/readyz").text == "no worker is ready\n"
        assert get(f"{http}/healthz").status == 200
        gate.unlink()
        wait_until(lambda: get(f"{http}/readyz").status == 200)


def test_a_draining_server_is_not_ready_and_ends_with_its_http_process() -> None:
    with EmbeddedServer(options=(*HTTP, *ONE_WORKER)) as server, bngrad.Client(server.target) as client:
        http, monitor, worker = http_of(server), http_process(server), worker_pid(server)
        call(client)
        os.kill(worker, signal.SIGSTOP)
        thread = threading.Thread(target=call, args=(client,))
        thread.start()
        wait_until(lambda: status_of(http)["server"]["in_flight"] == 1)
        server.process.terminate()
        wait_until(lambda: get(f"{http}/readyz").status == 503)
        assert get(f"{http}/readyz").text == "the server is stopping\n"
        os.kill(worker, signal.SIGCONT)
        thread.join()
        assert server.process.wait(30) == 0
        assert not is_running(monitor.pid)


def test_a_server_that_stops_answers_no_request_with_an_error_of_its_own() -> None:
    with EmbeddedServer(options=(*HTTP, *ONE_WORKER)) as server:
        http, statuses = http_of(server), set()
        server.process.terminate()
        with contextlib.suppress(OSError):  # it listens no longer
            while True:
                statuses.add(get(f"{http}/readyz").status)
        assert server.process.wait(30) == 0
        assert statuses <= {200, 503}
        assert "Traceback" not in server.stderr()


def test_a_killed_server_leaves_no_http_process_and_its_port_is_free() -> None:
    options = ("--http", f"127.0.0.1:{free_port()}")
    with EmbeddedServer(options=options) as server:
        http, monitor = http_of(server), http_process(server)
        server.process.kill()
        wait_until(lambda: not is_running(monitor.pid))
        with EmbeddedServer(options=options) as successor:
            assert http_of(successor) == http
            assert get(f"{http}/healthz").status == 200


@pytest.fixture(scope="module")
def harassed() -> Iterator[EmbeddedServer]:
    """A server whose HTTP port the tests misuse."""
    with EmbeddedServer(options=HTTP) as server:
        yield server


def test_an_http_process_that_dies_is_replaced(harassed: EmbeddedServer) -> None:
    http = http_of(harassed)
    assert get(f"{http}/healthz").status == 200
    victim = http_process(harassed)
    victim.kill()
    wait_until(lambda: not is_running(victim.pid))
    assert get(f"{http}/healthz").status == 200  # the new process listens on the same port


def test_a_front_process_that_does_not_answer_is_not_alive(harassed: EmbeddedServer) -> None:
    http = http_of(harassed)
    assert get(f"{http}/healthz").status == 200
    harassed.process.send_signal(signal.SIGSTOP)
    try:
        wait_until(lambda: get(f"{http}/healthz").status == 503)
        with ThreadPoolExecutor(4) as threads:  # no client waits for another one's answer
            asked = [threads.submit(get, f"{http}/healthz") for _ in range(4)]
            assert [each.result().status for each in asked] == [503] * 4
    finally:
        harassed.process.send_signal(signal.SIGCONT)
    wait_until(lambda: get(f"{http}/healthz").status == 200)


def test_a_taken_port_is_named(http: str) -> None:
    address = http.removeprefix("http://")
    complaint = f"Error: cannot listen on {address}: Address already in use"
    with pytest.raises(ServerStartError, match=complaint), EmbeddedServer(options=("--http", address)):
        pass


def test_a_name_that_no_host_can_have_is_reported_in_one_line() -> None:
    complaint = r"the server did not start:\nError: cannot listen on a\.\.b:80: it names no host\n$"
    with pytest.raises(ServerStartError, match=complaint), EmbeddedServer(options=("--http", "a..b:80")):
        pass


HAS_TWO_ADDRESSES = """
import socket
resolve = socket.getaddrinfo
def getaddrinfo(host, *details, **options):
    return [each for address in ("127.0.0.1", "127.0.0.2") for each in resolve(address, *details, **options)]
socket.getaddrinfo = getaddrinfo
"""


def test_a_host_answers_at_all_its_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_at_start(HAS_TWO_ADDRESSES, tmp_path, monkeypatch)
    with EmbeddedServer(options=("--http", "both:0")) as server:
        _, port = address_of(http_of(server))
        assert [get(f"http://{host}:{port}/healthz").status for host in ("127.0.0.1", "127.0.0.2")] == [200, 200]


@pytest.mark.parametrize("options", [(), ("--insecure",)])
def test_every_address_of_ipv6_is_every_address_of_ipv4_too_with_a_warning(options: tuple[str, ...]) -> None:
    with EmbeddedServer(options=("--http", "[::]:0", *options)) as server:
        _, port = address_of(http_of(server))
        assert get(f"http://127.0.0.1:{port}/healthz").status == 200
        warning = f"[::]:{port}, the address of --http, can be reached from other hosts"
        assert (warning in server.stderr()) is not bool(options)


def test_an_invalid_address_is_named() -> None:
    command = [sys.executable, "-m", "bngrad_cli", "serve", "--http", "unix:/tmp/x"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "--http is 'unix:/tmp/x'; it should be HOST:PORT" in ended.stderr


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n", 200),
        (b"HEAD /metrics HTTP/1.1\r\nHost: a\r\n\r\n", 200),
        (b"GET /healthz?verbose HTTP/1.0\r\n\r\n", 200),
        (b"GET /nothing HTTP/1.1\r\nHost: a\r\n\r\n", 404),
        (b"GET /../../etc/passwd HTTP/1.1\r\nHost: a\r\n\r\n", 404),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc", 405),
        (b"GET /healthz HTTP/1.1\r\n\r\n", 400),  # without Host
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 405),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 64 + b"\r\n\r\n", 400),  # TLS
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 2**20 + b"\r\n\r\n", 431),
        (b"GET /" + b"x" * 2**20 + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
    ],
)
def test_every_request_has_an_answer(http: str, request_bytes: bytes, status: int) -> None:
    with socket.create_connection(address_of(http), 30) as sock:
        sent = threading.Thread(target=_send, args=(sock, request_bytes))
        sent.start()
        answer = _receive(sock)
        sent.join()
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    if request_bytes.startswith(b"HEAD"):
        assert answer.endswith(b"\r\n\r\n")


STRANGERS = ("evil.example", "evil.example:9464", "a.b.evil.dev", "127.0.0.1.evil.dev", "localhost.evil.dev", "x.local")


@pytest.mark.parametrize("host", [*STRANGERS, "evil.dev:80:80", "[::1].evil.dev"])
@pytest.mark.parametrize("path", ["/", "/status.json", "/metrics", "/healthz", "/nothing"])
def test_a_stranger_s_name_for_the_host_is_refused(http: str, host: str, path: str) -> None:
    """As a browser sends it whose page rebinds its own name to this address."""
    answer = get(f"{http}{path}", Host=host)
    assert answer.status == 421
    assert answer.text.startswith(f"the Host header is '{host}'; it should be an address, localhost")
    assert "--http-names" in answer.text


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "127.0.0.1:9464", "10.1.2.3:9464", "[::1]:9464", "[fe80::1]", "localhost", "LOCALHOST.:1", ""),
        *("server:9464", "bngrad.default.svc:9464", "bngrad.default.svc.cluster.local", "host.docker.internal:9464"),
        *(socket.gethostname(), socket.getfqdn(), f"{socket.gethostname()}.local"),
    ],
)
def test_addresses_and_names_that_no_stranger_has_are_answered(http: str, host: str) -> None:
    """Kubernetes probes ask for the pod's address, Prometheus for what its configuration names."""
    wait_until(lambda: get(f"{http}/healthz", Host=host).status == 200)


def test_names_of_the_public_internet_can_be_allowed() -> None:
    options = ("--http", "localhost:0", "--http-names", "monitor.example,gpu1.example.org")
    with EmbeddedServer(options=options) as server:
        statuses = {
            host: get(f"{http_of(server)}/status.json", Host=host).status
            for host in ("monitor.example", "GPU1.example.org:9464", "localhost", "other.example")
        }
    assert list(statuses.values()) == [200, 200, 200, 421]


def _send(sock: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        sock.sendall(data)


def _receive(sock: socket.socket) -> bytes:
    answer = b""
    with contextlib.suppress(ConnectionResetError):  # the unread rest of a request that is too large
        while part := sock.recv(65536):
            answer += part
    return answer


def _silent(sock: socket.socket) -> None:
    pass


def _trickling(sock: socket.socket) -> None:
    sock.sendall(b"GET /metrics HTTP/1.1\r\nX-")


def _deaf(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    sock.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")


@pytest.mark.parametrize("behave", [_silent, _trickling, _deaf])
def test_many_idle_connections_do_not_keep_others_out(
    harassed: EmbeddedServer, behave: Callable[[socket.socket], None]
) -> None:
    http, monitor = http_of(harassed), http_process(harassed)
    with ExitStack() as stack, bngrad.Client(harassed.target) as client:
        for _ in range(CONNECTIONS):
            sock = stack.enter_context(socket.create_connection(address_of(http), 30))
            with contextlib.suppress(ConnectionError):  # it was the oldest already
                behave(sock)
        assert get(f"{http}/healthz").status == 200
        assert get(f"{http}/metrics").status == 200
        assert monitor.num_fds() < CONNECTIONS
        call(client)
    assert http_process(harassed).pid == monitor.pid


def test_a_request_whose_answer_takes_long_outlasts_a_flood_of_connections(harassed: EmbeddedServer) -> None:
    http = http_of(harassed)
    time.sleep(0.5)  # so that the answer before is too old to be given again
    harassed.process.send_signal(signal.SIGSTOP)
    try:
        with ExitStack() as stack:
            sock = stack.enter_context(socket.create_connection(address_of(http), 30))
            sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
            for _ in range(CONNECTIONS):
                stack.enter_context(socket.create_connection(address_of(http), 30))
            harassed.process.send_signal(signal.SIGCONT)
            assert _receive(sock).startswith(b"HTTP/1.1 ")
    finally:
        harassed.process.send_signal(signal.SIGCONT)


def test_a_client_that_sends_byte_by_byte_is_cut_off(http: str) -> None:
    with socket.create_connection(address_of(http), 30) as sock:
        sock.settimeout(0.2)
        sock.sendall(b"GET / HTTP/1.1\r\n")

        def is_closed() -> bool:
            try:
                sock.sendall(b"X")
                return sock.recv(1) == b""
            except TimeoutError:
                return False
            except ConnectionError:
                return True

        wait_until(is_closed)
