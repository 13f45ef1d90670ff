"""Connections that are made beside calls, over real sockets."""

from __future__ import annotations

import itertools
import socket
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.clock import Clock
from tests.servers import wait_until
from tests.unit.client.calls import interrupt_after, interrupt_at, no_thread
from tests.unit.client.endpoints import full_listener

from bngrad._transports import connector
from bngrad._transports.connector import Connector, NotYetConnectedError


def error_of(made: Connector) -> OSError:
    try:
        made.connect().close()
    except OSError as error:
        return error
    raise AssertionError("it was connected")


def is_connected(made: Connector) -> bool:
    try:
        made.connect().close()
    except NotYetConnectedError:
        return False
    return True


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_listening_port_is_connected_at_once(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector, "WAIT_S", 30.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        made = Connector((host, listener.getsockname()[1]))
        for _ in range(3):
            made.connect().close()


def test_a_unix_socket_is_connected_at_once(tmp_path: Path) -> None:
    path = f"{tmp_path}/socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        Connector(path).connect().close()


def test_a_port_without_listener_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector, "WAIT_S", 30.0)  # for the look-up
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        for address in (bound.getsockname(), f"{tmp_path}/socket", ("x" * 64, 1)):
            assert not isinstance(error_of(Connector(address)), NotYetConnectedError)


def test_a_name_is_looked_up_later_where_the_system_has_no_thread_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector, "WAIT_S", 30.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        made = Connector(("localhost", listener.getsockname()[1]))
        with no_thread("bngrad-lookup"), pytest.raises(NotYetConnectedError):
            made.connect()
        made.connect().close()


def names(monkeypatch: pytest.MonkeyPatch, *answers: list[tuple[str, int]]) -> list[str]:
    """Answers look-ups of names in place of a name server, the last ones all like the last; returns what is asked."""
    asked: list[str] = []

    def getaddrinfo(host: str, port: int, *, type: int, flags: int) -> list[Any]:  # noqa: A002 - its name
        if flags:
            raise socket.gaierror(socket.EAI_NONAME, "it is no number")
        asked.append(host)
        found = answers[min(len(asked), len(answers)) - 1]
        if not found:
            raise socket.gaierror(socket.EAI_AGAIN, "no name server answers")
        return [(socket.AF_INET, type, 6, "", address) for address in found]

    monkeypatch.setattr(connector, "WAIT_S", 30.0)
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return asked


@pytest.mark.parametrize("is_found", [True, False])
def test_a_name_is_looked_up_again_once_there_was_no_connection(
    monkeypatch: pytest.MonkeyPatch, is_found: bool
) -> None:
    with socket.socket() as bound, socket.create_server(("127.0.0.1", 0)) as listener:
        bound.bind(("127.0.0.1", 0))
        asked = names(monkeypatch, [bound.getsockname()] if is_found else [], [listener.getsockname()])
        made = Connector(("name", 1))
        assert not isinstance(error_of(made), NotYetConnectedError)
        for _ in range(2):
            made.connect().close()
    assert asked == ["name"] * 2


def test_a_name_is_looked_up_again_after_a_look_up_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    getaddrinfo, has_failed = socket.getaddrinfo, False

    def fail_once(host: str, port: int, *, type: int, flags: int) -> Any:  # noqa: A002 - its name
        nonlocal has_failed
        if not (flags or has_failed):
            has_failed = True
            raise MemoryError("for a test")
        return getaddrinfo(host, port, type=type, flags=flags)

    monkeypatch.setattr(connector, "WAIT_S", 1.0)
    monkeypatch.setattr(socket, "getaddrinfo", fail_once)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        made = Connector(("localhost", listener.getsockname()[1]))
        assert not isinstance(error_of(made), NotYetConnectedError)
        made.connect().close()


def test_a_name_is_looked_up_once_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    found, asked = threading.Event(), list[str]()

    def getaddrinfo(host: str, port: int, *, flags: int, **options: object) -> list[Any]:
        if not flags:
            asked.append(host)
            assert found.wait(30.0)
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    made = Connector(("name", 1))
    for _ in range(3):
        assert isinstance(error_of(made), NotYetConnectedError)
    found.set()
    wait_until(lambda: not isinstance(error_of(made), NotYetConnectedError))
    assert asked == ["name"]


def test_every_address_of_a_name_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    with socket.socket() as bound, full_listener() as full, socket.create_server(("127.0.0.1", 0)) as listener:
        bound.bind(("127.0.0.1", 0))
        names(monkeypatch, [each.getsockname() for each in (bound, full, listener)])
        made = Connector(("name", 1))
        monkeypatch.setattr(connector, "time", clock)
        made._looked_up()
        monkeypatch.setattr(connector, "WAIT_S", 0.02)
        assert isinstance(error_of(made), NotYetConnectedError)
        clock.now += 60.0
        monkeypatch.setattr(connector, "WAIT_S", 30.0)
        made.connect().close()


def test_one_call_at_a_time_looks_after_a_slow_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector, "_TIMEOUT_S", 60.0)
    is_connected, sockets, errors = connector._is_connected, list[socket.socket](), list[str]()

    def meanwhile(sock: socket.socket, wait_s: float) -> bool:
        sockets.append(sock)
        if len(sockets) in (1, 3):
            errors.append(str(error_of(made)))
        return is_connected(sock, wait_s)

    with full_listener() as listener, closing(Connector(listener.getsockname())) as made:
        monkeypatch.setattr(connector, "_is_connected", meanwhile)
        assert isinstance(error_of(made), NotYetConnectedError)
        assert [sock.fileno() >= 0 for sock in sockets] == [False, True]  # one is kept
        assert isinstance(error_of(made), NotYetConnectedError)
        assert sockets[2:] == sockets[1:2]
        assert errors == ["no connection within 0.02 s", "another call looks after the connection"]
        made.close()
        assert sockets[1].fileno() < 0


def test_a_connection_that_takes_long_is_there_for_a_later_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector, "_TIMEOUT_S", 60.0)
    with full_listener() as listener, closing(Connector(listener.getsockname())) as made:
        for _ in range(3):
            with pytest.raises(NotYetConnectedError):
                made.connect()
        for _ in range(2):
            listener.accept()[0].close()  # makes room
            wait_until(lambda: is_connected(made))


def test_a_connection_that_takes_long_is_kept_while_its_name_is_looked_up_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connector, "_TIMEOUT_S", 60.0)
    found = threading.Event()
    with full_listener() as listener, closing(Connector(("name", 1))) as made:
        monkeypatch.setattr(connector, "_resolved", lambda *_: found.wait(30.0))
        made._places = [(socket.AF_INET, listener.getsockname())]
        assert isinstance(error_of(made), NotYetConnectedError)
        made._places = []  # the connection of another call, which began before, was refused
        assert isinstance(error_of(made), NotYetConnectedError)
        listener.accept()[0].close()  # makes room
        wait_until(lambda: is_connected(made))
    found.set()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # sockets close themselves
@pytest.mark.parametrize("is_begun", [False, True])
def test_after_an_interrupt_at_any_step_a_call_looks_after_the_connection(
    is_begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connector, "_TIMEOUT_S", 60.0)
    with full_listener() as listener:
        for step in itertools.count():
            with closing(Connector(listener.getsockname())) as made:
                if is_begun:
                    error_of(made)
                is_over = not interrupt_at(step, lambda: error_of(made))
                assert "no connection within" in str(error_of(made))
            if is_over:
                break
    assert step > 5


def test_after_an_interrupt_no_other_address_is_tried() -> None:
    with full_listener() as listener, closing(Connector(listener.getsockname())) as made:
        made._places *= 2
        with interrupt_after("poll"):
            made.connect()
        assert made._pending is None


def test_a_connection_that_fails_once_its_name_has_fewer_addresses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(connector, "time", clock)
    with socket.socket() as bound, full_listener() as listener:
        bound.bind(("127.0.0.1", 0))
        made = Connector(bound.getsockname())
        made._places += Connector(listener.getsockname())._places
        assert isinstance(error_of(made), NotYetConnectedError)
        del made._places[1:]  # another call has looked the name up again
        clock.now += 60.0
        assert isinstance(error_of(made), TimeoutError)


def test_a_connection_that_takes_too_long_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector, "_TIMEOUT_S", 0.1)
    with full_listener() as listener, closing(Connector(listener.getsockname())) as made:
        errors: list[OSError] = []

        def has_failed() -> bool:
            errors.append(error_of(made))
            return isinstance(errors[-1], TimeoutError)

        wait_until(has_failed)
        assert all(isinstance(error, NotYetConnectedError) for error in errors[:-1])
