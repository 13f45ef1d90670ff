"""Servers that stop and restart under load: no request is lost, and load is spread again."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.integration.load import Load
from tests.integration.problems import Inputs, assert_gradients, random_inputs
from tests.servers import ONE_WORKER, TIMEOUT_S, TRANSPORTS, Transport, free_port, is_running, wait_until, worker_pid

import bngrad
from bngrad._balancing import resolver
from bngrad_cli.embedded import EmbeddedServer
from bngrad_kernels.spec import FLOAT32, Spec

SMALL, LARGE = Spec(FLOAT32, (2, 5, 5, 3), 3), Spec(FLOAT32, (16, 28, 28, 32), 3)


class Restarted:
    """A server that can be killed and restarted on the same address."""

    def __init__(self, listen: str) -> None:
        self._server = EmbeddedServer(listen, options=ONE_WORKER).__enter__()
        self.target = self._server.target

    @property
    def pid(self) -> int:
        return self._server.process.pid

    @property
    def processes(self) -> list[int]:
        return [self.pid, worker_pid(self._server)]

    def kill(self) -> None:
        worker = worker_pid(self._server)
        self._server.process.kill()
        self._server.process.wait()
        wait_until(lambda: not is_running(worker))
        self.stop()

    def start(self) -> None:
        self._server = EmbeddedServer(self.target, options=ONE_WORKER).__enter__()

    def stop(self) -> None:
        self._server.__exit__(None, None, None)

    def cpu_s(self) -> float:
        """The CPU time of its worker."""
        times = psutil.Process(worker_pid(self._server)).cpu_times()
        return float(times.user + times.system)


@contextmanager
def restarted(*listens: str) -> Iterator[list[Restarted]]:
    with ExitStack() as stack:
        servers = []
        for listen in listens:
            servers.append(Restarted(listen))
            stack.callback(servers[-1].stop)
        yield servers


INPUTS = [random_inputs(SMALL, 1), random_inputs(LARGE, 2)]


def somewhere() -> str:
    """A free TCP address for a server that is restarted on it."""
    return f"127.0.0.1:{free_port()}"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_call_survives_a_restart_of_the_only_server(transport: Transport) -> None:
    with restarted(somewhere()) as (server,), bngrad.Client(server.target, transport=transport) as client:
        with Load(client, INPUTS, callers=4) as load:
            load.wait(20)
            server.kill()
            time.sleep(0.3)
            server.start()
            load.wait(20)
        before = server.pid
        assert_gradients(LARGE, INPUTS[1], client.fused_batch_norm_grad_v2(*INPUTS[1]))
        assert server.pid == before


def test_a_call_survives_a_restart_on_a_unix_socket(tmp_path: Path) -> None:
    with (
        restarted(f"unix:{tmp_path}/bngrad.sock") as (server,),
        bngrad.Client(server.target) as client,
        Load(client, INPUTS, callers=4) as load,
    ):
        load.wait(20)
        server.kill()
        server.start()
        load.wait(20)


def test_a_result_in_shared_memory_survives_its_server() -> None:
    with restarted(somewhere()) as (server,), bngrad.Client(server.target) as client:
        y_backprop, x, out = (client.empty(LARGE.shape) for _ in range(3))
        y_backprop[...], x[...] = INPUTS[1][:2]
        inputs = Inputs(y_backprop, x, *INPUTS[1][2:])
        os.kill(worker_pid(server._server), signal.SIGSTOP)
        with ThreadPoolExecutor(1) as threads:
            answer = threads.submit(client.fused_batch_norm_grad_v2, *inputs, out=out)
            time.sleep(0.3)
            os.kill(worker_pid(server._server), signal.SIGCONT)
            server.kill()
            server.start()
            assert_gradients(LARGE, INPUTS[1], answer.result(60))
        assert answer.result().x_backprop is out


def test_a_call_to_a_server_that_stays_away_ends_at_its_timeout() -> None:
    with restarted(somewhere()) as (server,), bngrad.Client(server.target) as client:
        client.fused_batch_norm_grad_v2(*INPUTS[0])
        server.kill()
        begin = time.monotonic()
        # The deadline passes during an attempt, or the next attempt would come after it.
        errors = bngrad.UnavailableError, bngrad.DeadlineExceededError
        with pytest.raises(errors, match=r"\(\d+ attempts in \d+\.\d s"):
            client.fused_batch_norm_grad_v2(*INPUTS[0], timeout=5)
        assert time.monotonic() - begin < TIMEOUT_S / 2
        server.start()


@pytest.mark.parametrize("transport", ["auto", "unary"])
def test_no_request_is_lost_when_a_server_goes_and_comes_back(tmp_path: Path, transport: Transport) -> None:
    with restarted(somewhere(), f"unix:{tmp_path}/bngrad.sock") as servers:
        targets = [server.target for server in servers]
        with bngrad.Client(targets, transport=transport) as client, Load(client, INPUTS) as load:
            load.wait(50)
            servers[0].kill()
            load.wait(50)
            servers[0].start()
            used = servers[0].cpu_s()
            wait_until(lambda: servers[0].cpu_s() > used + 0.05)
            load.wait(50)


def test_calls_of_a_frozen_server_are_repeated_elsewhere() -> None:
    """It keeps its connections: nothing says that it will not answer."""
    with restarted(somewhere(), somewhere()) as (server, frozen), ExitStack() as stack:
        clients = [
            stack.enter_context(bngrad.Client([frozen.target, server.target], transport=transport))
            for transport in TRANSPORTS
        ]
        seconds: list[float] = []

        def call(client: bngrad.Client) -> None:
            began = time.monotonic()
            assert_gradients(LARGE, INPUTS[1], client.fused_batch_norm_grad_v2(*INPUTS[1]))
            seconds.append(time.monotonic() - began)

        with ThreadPoolExecutor(16) as threads:
            list(threads.map(call, clients * 4))
            longest_s, processes = max(seconds), frozen.processes
            for each in processes:
                os.kill(each, signal.SIGSTOP)
            try:
                list(threads.map(call, clients * 4, timeout=TIMEOUT_S / 2))
            finally:
                for each in processes:
                    os.kill(each, signal.SIGCONT)
        assert max(seconds) > longest_s + 1.0  # some calls were there


def test_calls_of_a_draining_server_go_to_the_other() -> None:
    with restarted(somewhere(), somewhere()) as servers:
        targets = [server.target for server in servers]
        with bngrad.Client(targets) as client, Load(client, INPUTS) as load:
            load.wait(50)
            servers[0].stop()
            load.wait(50)
            servers[0].start()
            servers[1].stop()
            load.wait(50)


def test_arrays_of_one_servers_memory_are_copied_for_the_other() -> None:
    with restarted(somewhere(), somewhere()) as servers, bngrad.Client([server.target for server in servers]) as client:
        y_backprop, x, out = (client.empty(LARGE.shape) for _ in range(3))
        y_backprop[...], x[...] = INPUTS[1][:2]
        idle = [server.cpu_s() for server in servers]

        def have_both_computed() -> bool:
            out[...] = 0
            result = client.fused_batch_norm_grad_v2(y_backprop, x, *INPUTS[1][2:], out=out)
            assert result.x_backprop is out
            assert_gradients(LARGE, INPUTS[1], result)
            return all(server.cpu_s() > before for server, before in zip(servers, idle, strict=True))

        wait_until(have_both_computed, poll_s=0)


def test_a_name_of_several_addresses_stands_for_several_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the name server is simulated."""
    monkeypatch.setattr(resolver, "_LONGEST_INTERVAL_S", 0.05)
    listens = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
    port, addresses = free_port(*listens), listens[:2]
    resolve: Callable[..., Any] = socket.getaddrinfo

    def getaddrinfo(host: str, *options: Any, **named: Any) -> list[Any]:
        hosts = addresses if host == "several" else [host]
        return [each for name in hosts for each in resolve(name, *options, **named)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with (
        restarted(*(f"{host}:{port}" for host in listens)) as servers,
        bngrad.Client(f"dns:///several:{port}") as client,
        Load(client, INPUTS) as load,
    ):
        load.wait(100)
        addresses[:] = listens[1:]
        used = servers[2].cpu_s()
        servers[0].kill()
        wait_until(lambda: servers[2].cpu_s() > used + 0.05)
        load.wait(50)
        servers[0].start()
