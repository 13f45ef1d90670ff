"""A server behind a port mapping is found where it says."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest
from tests.integration.problems import Case, assert_same_bits, random_inputs
from tests.servers import ONE_WORKER, endpoints_of, free_port, ports_of, run_bngrad, wait_until

import bngrad
from bngrad_cli.embedded import EmbeddedServer

CASE = Case("v2", "NHWC", (16, 65, 65, 9))


class PortMapping:
    """Takes connections on a port of its own, and passes them on to another one, as a gateway does.

    Attributes:
        port: The port of its own.
        target: The other port.
        connections: Both ends of the connections that it has taken.
    """

    def __init__(self, target: int) -> None:
        self.connections: list[socket.socket] = []
        self.target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self.target))
                self.connections += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=_pass_on, args=pair).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in self.connections:
            each.close()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(2**16):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def mapping() -> Iterator[PortMapping]:
    mapping = PortMapping(free_port())
    yield mapping
    mapping.close()


def test_tensors_go_to_the_address_that_a_server_advertises(mapping: PortMapping) -> None:
    options = ("--advertise-stream", f"localhost:{mapping.port}", *ONE_WORKER)
    inputs = random_inputs(CASE.spec())
    with EmbeddedServer(f"127.0.0.1:{mapping.target}", options=options) as server:
        advertised = endpoints_of(server.target)
        assert (advertised.stream_host, advertised.stream_port) == ("localhost", mapping.port)
        assert mapping.target in ports_of(server.process.pid)
        assert f" localhost:{mapping.port}\n" in run_bngrad("info", server.target).stdout
        with bngrad.Client(server.target, transport="unary") as other:
            expected = CASE.run(other, inputs)
        with bngrad.Client(server.target, transport="stream") as client:

            def uses_the_mapping() -> bool:
                assert_same_bits(CASE.run(client, inputs), expected)
                return bool(mapping.connections)

            wait_until(uses_the_mapping)  # it is tried beside the first calls
            assert_same_bits(CASE.run(client, inputs), expected)


def test_info_does_not_name_a_port_that_a_mapping_hides(mapping: PortMapping) -> None:
    with EmbeddedServer(f"127.0.0.1:{mapping.target}", options=ONE_WORKER) as server:
        assert server.target.endswith(f":{mapping.target}")
        told = run_bngrad("info", f"127.0.0.1:{mapping.port}").stdout
    assert "the address that it is given\n" in told
    assert str(mapping.target) not in told


def test_tensors_go_by_the_port_that_a_client_was_given(mapping: PortMapping) -> None:
    inputs = random_inputs(CASE.spec())
    with EmbeddedServer(f"127.0.0.1:{mapping.target}", options=(*ONE_WORKER, "--shared-bytes", "0")) as server:
        assert endpoints_of(server.target).stream_port == mapping.target
        target = f"127.0.0.1:{mapping.port}"
        with bngrad.Client(target, transport="unary") as other, bngrad.Client(target, transport="stream") as client:
            expected = CASE.run(other, inputs)
            assert len(mapping.connections) == 2  # the ends of grpcio's, which both clients share

            def uses_the_mapping() -> bool:
                assert_same_bits(CASE.run(client, inputs), expected)
                return len(mapping.connections) == 4

            wait_until(uses_the_mapping)
            assert_same_bits(CASE.run(client, inputs), expected)
