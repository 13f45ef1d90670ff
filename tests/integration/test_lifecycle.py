"""The life of a server: readiness, reflection, draining, signals, cleaning up."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from tests.servers import (
    BNGRAD,
    ONE_WORKER,
    TIMEOUT_S,
    TRANSPORTS,
    Transport,
    children_of,
    endpoints_of,
    hold_new_workers,
    is_running,
    run_at_start,
    run_bngrad,
    starting_server,
    wait_until,
    worker_pid,
    worker_pids,
    workers_of,
)

import bngrad
from bngrad_cli.embedded import EmbeddedServer, ServerStartError
from bngrad_kernels import compiled_code
from bngrad_kernels.cpu.machine_code import loader
from bngrad_kernels.cpu.machine_code.kernels import FIRST, host
from bngrad_server.config import ServerConfig
from bngrad_wire import __version__

SERVICE = "bngrad.v1.BatchNormGradService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
TENSOR, STATS = np.ones((2, 3, 3, 4), np.float32), np.ones(4, np.float32)


def call(client: bngrad.Client, timeout: float = TIMEOUT_S) -> None:
    client.fused_batch_norm_grad_v2(TENSOR, TENSOR, STATS, STATS, STATS, timeout=timeout)


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return hold_new_workers(tmp_path, monkeypatch)


@pytest.mark.parametrize("service", ["", SERVICE])
def test_health_is_not_serving_before_the_worker_is_warm_and_serving_after(
    tmp_path: Path, gate: Path, service: str
) -> None:
    address = f"unix:{tmp_path}/bngrad.sock"
    with starting_server(address, gate) as process, grpc.insecure_channel(address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check  # type: ignore[attr-defined]
        message = health_pb2.HealthCheckRequest(service=service)
        assert check(message, wait_for_ready=True, timeout=TIMEOUT_S).status == NOT_SERVING
        gate.unlink()
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"bngrad %s ready on unix:" % __version__.encode())
        assert check(message).status == SERVING


def test_requests_that_arrive_before_the_worker_is_warm_wait_for_it(tmp_path: Path, gate: Path) -> None:
    address = f"unix:{tmp_path}/bngrad.sock"
    with starting_server(address, gate), bngrad.Client(address) as client, ThreadPoolExecutor() as threads:
        answer = threads.submit(call, client)
        with pytest.raises(FutureTimeoutError):
            answer.result(0.5)
        gate.unlink()
        answer.result()


SLOW_LIBRARY = """
import ctypes, sys, threading, time
start = threading.Thread.start
def start_then_load(thread):
    start(thread)
    if thread.name == "heartbeat":
        time.sleep(0.05)  # the first heartbeat goes out
        ctypes.PyDLL(None).usleep(3_000_000)  # while no other thread runs
if "bngrad_server.workers.main" in sys.orig_argv:
    threading.Thread.start = start_then_load
"""


def test_a_starting_worker_may_take_long_to_load_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_at_start(SLOW_LIBRARY, tmp_path, monkeypatch)
    options = ("--workers", "1", "--worker-timeout", "1")
    with EmbeddedServer(options=options) as server, bngrad.Client(server.target) as client:
        call(client)
        assert client.server_info().devices[0].restarts == 0


def test_a_starting_worker_has_longer_until_its_first_sign_of_life(gate: Path) -> None:
    """Delays the start as a busy machine does."""
    gate.touch()
    opening = threading.Timer(ServerConfig().worker_timeout_s + 1, gate.unlink)
    opening.start()
    with EmbeddedServer(options=("--workers", "1")) as server, bngrad.Client(server.target) as client:
        opening.join()
        call(client)
        assert client.server_info().devices[0].restarts == 0


def test_a_restarting_worker_does_not_delay_the_end(gate: Path) -> None:
    with EmbeddedServer(options=ONE_WORKER) as server:
        gate.touch()
        victim = worker_pid(server)
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: worker_pids(server) not in ([], [victim]))
        server.process.terminate()
        assert server.process.wait(TIMEOUT_S / 2) == 0


def test_a_signal_during_the_start_ends_the_server_at_once(tmp_path: Path, gate: Path) -> None:
    with starting_server(f"unix:{tmp_path}/bngrad.sock", gate) as process:
        process.terminate()
        assert process.wait(TIMEOUT_S) == 128 + signal.SIGTERM


SIGNALS_COME_AS_THE_MAIN_THREAD_BEGINS_TO_WAIT = """
import signal, threading
threading.Thread(target=threading.Event().wait, daemon=True).start()  # this thread gets them
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
"""


def test_signals_are_handled_while_the_main_thread_waits(
    tmp_path: Path, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_at_start(SIGNALS_COME_AS_THE_MAIN_THREAD_BEGINS_TO_WAIT, tmp_path, monkeypatch)
    with starting_server(f"unix:{tmp_path}/starting.sock", gate) as process:
        process.terminate()
        assert process.wait(TIMEOUT_S) == 128 + signal.SIGTERM
    with EmbeddedServer(options=ONE_WORKER) as server:
        assert server.stop() == 0


def test_a_worker_that_does_not_end_delays_the_end_for_seconds_only() -> None:
    with EmbeddedServer(options=ONE_WORKER) as server:
        os.kill(worker_pid(server), signal.SIGSTOP)
        server.process.terminate()
        assert server.process.wait(TIMEOUT_S / 3) == 0


@pytest.mark.parametrize("calls", [1, 2])
def test_calls_of_stock_clients_that_outlast_the_drain_timeout_do_not_keep_the_server(calls: int) -> None:
    """The second call waits for the worker that has the first one."""
    large = np.ones((4, 32, 32, 64), np.float32)  # so each call has a thread
    options = (*ONE_WORKER, "--drain-timeout", "1")
    with EmbeddedServer(options=options) as server, ThreadPoolExecutor(calls) as threads:
        os.kill(worker_pid(server), signal.SIGSTOP)
        with bngrad.Client(server.target, transport="unary", retries=False) as client:
            stats = (np.ones(64, np.float32),) * 3
            answers = [threads.submit(client.fused_batch_norm_grad_v2, large, large, *stats) for _ in range(calls)]
            wait_until(lambda: client.server_info().requests == calls)
            server.process.terminate()
            try:
                assert server.process.wait(TIMEOUT_S / 3) == 0
            finally:
                server.process.kill()
            for answer in answers:
                assert isinstance(answer.exception(), bngrad.UnavailableError)


def test_a_compiler_of_kernels_that_does_not_end_does_not_delay_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = loader.path(FIRST, host())
    copy = tmp_path / first.relative_to(compiled_code.cache_folder().parent)
    copy.parent.mkdir(parents=True)
    shutil.copy(first, copy)  # the others are missing
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler = "bngrad_kernels.cpu.machine_code.warm"
    run_at_start(f"import sys, time\nif {compiler!r} in sys.orig_argv: time.sleep(600)\n", tmp_path, monkeypatch)
    with EmbeddedServer(options=ONE_WORKER) as server:
        assert len(children_of(server.process.pid, compiler)) == 1
        server.process.terminate()
        assert server.process.wait(TIMEOUT_S / 3) == 0


@pytest.mark.parametrize("closing", ["2>&-", "0<&- 2>&-"])
def test_a_server_runs_without_standard_files(tmp_path: Path, closing: str) -> None:
    serve = [*BNGRAD, "serve", *ONE_WORKER, "--listen", f"unix:{tmp_path}/socket"]
    command = ["sh", "-c", f'exec "$@" {closing}', "sh", *serve]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert " ready on " in process.stdout.readline()
        with bngrad.Client(f"unix:{tmp_path}/socket") as client:
            call(client)
        process.terminate()
        assert process.wait(TIMEOUT_S) == 0


def test_reflection_lists_the_services(server: EmbeddedServer) -> None:
    with grpc.insecure_channel(server.target) as channel:
        services = ProtoReflectionDescriptorDatabase(channel).get_services()
    assert {SERVICE, "grpc.health.v1.Health"} <= set(services)


def test_both_versions_of_reflection_answer_the_same(server: EmbeddedServer) -> None:
    questions = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
    ]
    answers = []
    with grpc.insecure_channel(server.target) as channel:
        for version in ("v1", "v1alpha"):
            path = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
            reflect: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(path)
            answers.append(list(reflect(iter([each.SerializeToString() for each in questions]), timeout=TIMEOUT_S)))
    assert len(answers[0]) == len(questions)
    assert answers[0] == answers[1]


def test_server_info_describes_the_server(client: bngrad.Client) -> None:
    info = client.server_info()
    assert info.version == __version__
    assert [device.name for device in info.devices] == [f"cpu:{i}" for i in range(ServerConfig().workers)]
    assert info.devices[0].state == "ready"
    assert "FusedBatchNormGradV3" in info.ops
    assert info.max_message_bytes == ServerConfig().max_message_bytes
    assert info.arena_bytes > 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_requests_in_flight_end_and_the_server_exits_0(
    own_server: EmbeddedServer, number: signal.Signals
) -> None:
    worker = worker_pid(own_server)
    with bngrad.Client(own_server.target) as client, ThreadPoolExecutor(1) as threads:
        answer = call_in_flight(client, worker, threads)
        own_server.process.send_signal(number)
        wait_until(lambda: "draining" in own_server.stderr())
        with pytest.raises(FutureTimeoutError):
            answer.result(0.5)
        os.kill(worker, signal.SIGCONT)
        answer.result()
    assert own_server.process.wait(TIMEOUT_S) == 0
    assert not is_running(worker)


def test_a_signal_that_workers_get_too_lets_requests_in_flight_end_there(own_server: EmbeddedServer) -> None:
    """Such as Ctrl-C in a terminal."""
    worker = worker_pid(own_server)
    with bngrad.Client(own_server.target) as client, ThreadPoolExecutor(1) as threads:
        answer = call_in_flight(client, worker, threads)
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            os.kill(worker, number)
        own_server.process.terminate()
        wait_until(lambda: "draining" in own_server.stderr())
        os.kill(worker, signal.SIGCONT)
        answer.result()
    assert own_server.process.wait(TIMEOUT_S) == 0
    assert "worker of device" not in own_server.stderr()


def test_two_signals_at_once_are_one(own_server: EmbeddedServer) -> None:
    worker = worker_pid(own_server)
    with bngrad.Client(own_server.target) as client, ThreadPoolExecutor(1) as threads:
        answer = call_in_flight(client, worker, threads)
        for _ in range(2):  # as timeout(1) sends them
            own_server.process.terminate()
        wait_until(lambda: "draining" in own_server.stderr())
        os.kill(worker, signal.SIGCONT)
        answer.result()
    assert own_server.process.wait(TIMEOUT_S) == 0


@pytest.mark.parametrize("before", ["SIG_DFL", "SIG_IGN"], ids=["a terminal", "nohup"])
def test_a_closed_terminal_stops_a_server_but_not_one_of_nohup(tmp_path: Path, before: str) -> None:
    begin = (
        f"import os, signal, sys; signal.signal(signal.SIGHUP, signal.{before}); os.execv(sys.argv[1], sys.argv[1:])"
    )
    serve = [*BNGRAD, "serve", *ONE_WORKER, "--listen", f"unix:{tmp_path}/socket"]
    with subprocess.Popen([sys.executable, "-c", begin, *serve], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert " ready on " in process.stdout.readline()
        process.send_signal(signal.SIGHUP)
        if before == "SIG_IGN":
            time.sleep(0.5)
            with bngrad.Client(f"unix:{tmp_path}/socket") as client:
                call(client)
            process.terminate()
        assert process.wait(TIMEOUT_S) == 0


def test_a_reader_of_the_first_line_that_reads_nothing_keeps_no_server_from_its_end(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    size = fcntl.fcntl(writing, fcntl.F_GETPIPE_SZ)
    os.write(writing, bytes(size))
    command = [*BNGRAD, "serve", *ONE_WORKER, "--listen", f"unix:{tmp_path}/socket"]
    with subprocess.Popen(command, stdout=writing) as process:
        wait_until((tmp_path / "socket").exists)
        with bngrad.Client(f"unix:{tmp_path}/socket") as client:
            wait_until(lambda: "ready" in client.server_info().devices[0].state)
            time.sleep(0.5)  # until it prints
            process.terminate()
        assert process.wait(TIMEOUT_S) == 0
    os.close(reading)
    os.close(writing)


def call_in_flight(client: bngrad.Client, worker: int, threads: ThreadPoolExecutor) -> Future[None]:
    """Stops the only worker and makes a call; returns once the server has received it."""
    os.kill(worker, signal.SIGSTOP)
    answer = threads.submit(call, client)
    wait_until(lambda: client.server_info().requests == 1)
    return answer


def test_draining_refuses_new_requests(own_server: EmbeddedServer) -> None:
    with bngrad.Client(own_server.target, retries=False) as client:
        call(client)
        own_server.stop()
        with pytest.raises(bngrad.UnavailableError):
            call(client)


def test_a_second_signal_ends_the_server_at_once(own_server: EmbeddedServer) -> None:
    worker = worker_pid(own_server)
    with bngrad.Client(own_server.target, retries=False) as client, ThreadPoolExecutor(1) as threads:
        answer = call_in_flight(client, worker, threads)
        own_server.process.terminate()
        wait_until(lambda: "draining" in own_server.stderr())
        time.sleep(0.2)  # two that come at once are one
        begin = time.monotonic()
        own_server.process.terminate()
        assert own_server.process.wait(TIMEOUT_S) == 128 + signal.SIGTERM
        assert time.monotonic() - begin < ServerConfig().drain_timeout_s / 2
        with pytest.raises(bngrad.BngradError):
            answer.result()
    wait_until(lambda: not is_running(worker))  # although it is stopped


def test_a_killed_front_leaves_no_worker_and_no_shared_memory_behind(own_server: EmbeddedServer) -> None:
    with bngrad.Client(own_server.target) as client:
        call(client)
    worker, directory = worker_pid(own_server), Path(endpoints_of(own_server.target).local_directory)
    assert directory.exists()
    own_server.process.kill()
    wait_until(lambda: not is_running(worker))
    wait_until(lambda: not directory.exists())


def test_a_server_can_listen_where_one_has_just_ended(own_server: EmbeddedServer) -> None:
    target = own_server.target
    with bngrad.Client(target) as client:
        call(client)
    own_server.stop()
    with EmbeddedServer(target) as successor, bngrad.Client(successor.target) as client:
        call(client)


def test_a_taken_port_is_named(server: EmbeddedServer) -> None:
    complaint = f"Error: cannot listen on {server.target}: Address already in use"
    with pytest.raises(ServerStartError, match=complaint), EmbeddedServer(server.target):
        pass


def test_a_second_server_does_not_take_a_socket_away(server: EmbeddedServer, socket_path: Path) -> None:
    complaint = f"Error: cannot listen on unix:{socket_path}: the address is taken"
    with pytest.raises(ServerStartError, match=complaint), EmbeddedServer(f"unix:{socket_path}"):
        pass
    with bngrad.Client(f"unix:{socket_path}") as client:
        call(client)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_path_is_taken_as_it_is_written(tmp_path: Path, transport: Transport) -> None:
    path = tmp_path / "a%41?#"
    with (
        EmbeddedServer(f"unix:{path}", options=ONE_WORKER),
        bngrad.Client(f"unix:{path}", transport=transport) as client,
    ):
        assert path.is_socket()
        call(client)
        assert run_bngrad("info", f"unix:{path}").returncode == 0


def test_a_wrong_address_is_named() -> None:
    reasons = "Name or service not known|Temporary failure in name resolution"  # depends on the name server
    complaint = rf"Error: cannot listen on nowhere\.invalid:1: ({reasons})"
    with pytest.raises(ServerStartError, match=complaint), EmbeddedServer("nowhere.invalid:1"):
        pass


def test_an_unusable_address_is_reported_in_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        complaints = {
            f"127.0.0.1:{port}": "Address already in use",
            f"unix:{tmp_path}/none/socket": f"there is no folder {tmp_path}/none",
            "192.0.2.1:0": "Cannot assign requested address",
        }
        for address, complaint in complaints.items():
            options = ["--device", "cpu", "--insecure", "--listen", address]
            serve = [sys.executable, "-m", "bngrad_cli", "serve", *options]
            ended = subprocess.run(serve, capture_output=True, text=True, timeout=60)
            assert ended.returncode == 1
            assert (ended.stdout, ended.stderr) == ("", f"Error: cannot listen on {address}: {complaint}\n")


def test_a_worker_that_cannot_start_ends_the_server_with_a_reason() -> None:
    code = "import sys; sys.executable = '/bin/false'; from bngrad_cli.main import main; main()"
    serve = [sys.executable, "-c", code, "serve", "--listen", "127.0.0.1:0"]
    ended = subprocess.run(serve, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "Error: the worker of device cpu:0 ended before it was ready" in ended.stderr


def test_a_server_whose_worker_cannot_start_does_not_wait_for_requests(tmp_path: Path, gate: Path) -> None:
    address = f"unix:{tmp_path}/bngrad.sock"
    with (
        starting_server(address, gate) as process,
        bngrad.Client(address, retries=False) as client,
        ThreadPoolExecutor(1) as threads,
    ):
        answer = threads.submit(call, client)
        wait_until(lambda: client.server_info().requests == 1)
        (worker,) = workers_of(process.pid)
        worker.kill()
        assert process.wait(ServerConfig().drain_timeout_s / 2) == 1
        assert isinstance(answer.exception(), bngrad.UnavailableError)


def test_no_process_of_a_server_imports_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may be /tmp, where anyone can put a module."""
    for name in sys.stdlib_module_names:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write(' '.join(__name__))")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)  # which may name the current folder itself
    with (
        EmbeddedServer(options=(*ONE_WORKER, "--http", "127.0.0.1:0")) as server,
        bngrad.Client(server.target) as client,
    ):
        call(client)
        page = re.search(r"HTTP: (\S+)", server.stderr())
        assert page is not None
        assert urllib.request.urlopen(f"http://{page[1]}/healthz").status == 200
    assert not (tmp_path / "imported").exists()
