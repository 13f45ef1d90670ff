"""The sockets for leases in shared memory's file system, with real clients."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import os
import re
import resource
import selectors
import shutil
import socket
import stat
import struct
import tempfile
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from tests.unit.server.workers.additions import TIMEOUT_S, wait_until

from bngrad_server.memory import leases
from bngrad_server.memory.leases import PARENT, LeaseServer
from bngrad_server.memory.regions import Region, Regions
from bngrad_wire.lease_protocol import IS_IN_USE, NOT_IN_USE

NBYTES = 4096


@pytest.fixture
def regions() -> Regions:
    return Regions(4 * NBYTES, lambda region: None, lambda region: None)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where servers of other tests do not connect to see whether this one lives."""
    with tempfile.TemporaryDirectory(dir=PARENT) as parent:
        monkeypatch.setattr(leases, "PARENT", Path(parent))
        yield


@contextmanager
def serving(regions: Regions, group: str | None = None) -> Iterator[LeaseServer]:
    with contextlib.closing(LeaseServer(regions, group)) as sockets:
        sockets.start()
        yield sockets


@pytest.fixture
def sockets(regions: Regions) -> Iterator[LeaseServer]:
    with serving(regions) as sockets:
        yield sockets


def connect(sockets: LeaseServer) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.connect(str(sockets.directory / "regions"))  # without a timeout, so that it waits if the queue is full
    client.settimeout(TIMEOUT_S)
    return client


def ask(client: socket.socket, nbytes: int) -> tuple[bytes, list[int]]:
    """Asks for a region, and returns the answer: the message and the descriptors."""
    client.send(struct.pack("<Q", nbytes))
    answer, fds, _, _ = socket.recv_fds(client, 1024, 4)
    return answer, fds


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(
    ("group", "directory_mode", "socket_mode"),
    [(None, 0o700, 0o600), (grp.getgrgid(os.getgid()).gr_name, 0o750, 0o660)],
)
def test_the_sockets_are_for_this_user_or_a_group_alone(
    regions: Regions, group: str | None, directory_mode: int, socket_mode: int
) -> None:
    with serving(regions, group) as sockets:
        assert sockets.directory.parent == PARENT
        assert mode(sockets.directory) == directory_mode
        assert {path.name: mode(path) for path in sockets.directory.iterdir()} == {
            "calls": socket_mode,
            "regions": socket_mode,
        }
        assert sockets.directory.stat().st_uid == os.getuid()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(sockets.directory / "calls"))
    assert not sockets.directory.exists()


def test_an_unknown_group_leaves_nothing_behind(
    regions: Regions, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(leases, "PARENT", tmp_path)  # in the real one, servers of other tests come and go
    with pytest.raises(LookupError):
        LeaseServer(regions, "no-such-group-here")
    assert list(tmp_path.iterdir()) == []


def test_a_lease_lasts_as_long_as_its_connection(regions: Regions, sockets: LeaseServer) -> None:
    with connect(sockets) as client:
        key, (fd,) = ask(client, NBYTES)
        assert len(key) == 16
        assert os.fstat(fd).st_size == NBYTES
        with connect(sockets) as other:
            other_key, (other_fd,) = ask(other, 2 * NBYTES)
            assert other_key != key
            assert regions.nbytes == 3 * NBYTES
        wait_until(lambda: len(regions) == 1)
    wait_until(lambda: len(regions) == 0)
    wait_until(lambda: regions.kept_nbytes == 3 * NBYTES)  # since this process has not closed them
    for each in (fd, other_fd):
        os.close(each)
    wait_until(lambda: regions.nbytes == 0)


def test_a_refusal_says_why_and_ends_the_connection(regions: Regions, sockets: LeaseServer) -> None:
    with connect(sockets) as client:
        answer, fds = ask(client, 5 * NBYTES)
        assert answer.decode() == "a region of 20480 bytes is more than is left of the 16384 bytes to share"
        assert fds == []
        assert client.recv(1) == b""
    assert regions.nbytes == 0


@pytest.mark.parametrize("nbytes", [NBYTES, 5 * NBYTES], ids=["a lease", "a refusal"])
def test_a_client_that_leaves_before_its_answer_is_forgotten_without_a_word(
    regions: Regions, sockets: LeaseServer, caplog: pytest.LogCaptureFixture, nbytes: int
) -> None:
    for _ in range(20):
        with connect(sockets) as client:
            client.send(struct.pack("<Q", nbytes))
    with connect(sockets) as last:
        assert len(ask(last, NBYTES)[0]) == 16
    wait_until(lambda: len(regions) == 0)
    assert caplog.messages == []


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, os.strerror(errno.EMFILE)), MemoryError()], ids=repr)
def test_a_lease_that_cannot_be_handed_over_ends_and_others_go_on(
    regions: Regions, sockets: LeaseServer, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(region: Region) -> int:
        raise error

    with monkeypatch.context() as failing, connect(sockets) as client:
        failing.setattr(Region, "open_for_client", fail)
        assert ask(client, NBYTES) == (b"", [])
    wait_until(lambda: regions.nbytes == 0)
    with connect(sockets) as client:
        _, (fd,) = ask(client, NBYTES)
        os.close(fd)


@pytest.mark.parametrize(
    "message", [b"", b"\x00\x10\x00\x00", bytes(8), struct.pack("<Q", NBYTES) + b"!"], ids=["", "half", "zero", "more"]
)
def test_the_connection_of_a_client_that_sends_anything_else_is_closed(
    regions: Regions, sockets: LeaseServer, message: bytes
) -> None:
    with connect(sockets) as client:
        client.send(message) if message else client.shutdown(socket.SHUT_WR)
        fds: list[int] = []
        try:
            while (received := socket.recv_fds(client, 1024, 4))[0]:
                fds += received[1]
        except ConnectionResetError:  # closed before it had read all
            pass
        for fd in fds:
            os.close(fd)
    wait_until(lambda: regions.nbytes == 0)


def test_a_client_that_sends_nothing_delays_no_other(regions: Regions, sockets: LeaseServer) -> None:
    with connect(sockets), connect(sockets) as client:
        _, (fd,) = ask(client, NBYTES)
        os.close(fd)
        assert regions.nbytes == NBYTES


def test_closing_ends_every_lease_and_connection(regions: Regions) -> None:
    with serving(regions) as sockets:
        client, silent = connect(sockets), connect(sockets)
        _, (fd,) = ask(client, NBYTES)
        os.close(fd)
    assert regions.nbytes == 0
    assert not sockets.directory.exists()
    for each in (client, silent):
        with each:
            assert each.recv(1) == b""


def test_a_server_that_never_started_closes_too(regions: Regions) -> None:
    sockets = LeaseServer(regions, None)
    sockets.close()
    assert not sockets.directory.exists()


@pytest.mark.parametrize("with_socket", [True, False])
def test_the_directory_of_a_dead_server_is_removed_and_that_of_a_living_one_left(
    regions: Regions, sockets: LeaseServer, with_socket: bool
) -> None:
    dead = PARENT / f"bngrad-{os.urandom(16).hex()}"
    draft = dead.with_name(f".{dead.name}")  # which no server of another test that starts meanwhile removes
    draft.mkdir(0o700)
    if with_socket:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(draft / "regions"))
    draft.rename(dead)
    with serving(regions) as other:
        assert not dead.exists()
        assert {path.name for path in sockets.directory.iterdir()} == {"calls", "regions"}
        assert other.directory != sockets.directory
        with connect(sockets) as client:
            _, (fd,) = ask(client, NBYTES)
            os.close(fd)


def test_the_draft_of_a_dead_server_is_removed_and_that_of_a_starting_one_left(
    regions: Regions, request: pytest.FixtureRequest
) -> None:
    dead, starting = (PARENT / f".bngrad-{os.urandom(16).hex()}" for _ in range(2))
    for draft in (dead, starting):
        draft.mkdir(0o700)
        request.addfinalizer(partial(shutil.rmtree, draft, ignore_errors=True))
    os.utime(dead, (0, 0))
    with serving(regions):
        assert not dead.exists()
        assert starting.exists()


@pytest.mark.parametrize("name", ["bngrad-results", *(f"bngrad-{'0' * digits}" for digits in (31, 32, 33))])
def test_a_directory_that_no_server_made_is_left(regions: Regions, request: pytest.FixtureRequest, name: str) -> None:
    directory = PARENT / name
    directory.mkdir(0o700)
    request.addfinalizer(partial(shutil.rmtree, directory))
    (directory / "regions").write_text("of the user")
    with serving(regions):
        assert (directory / "regions").exists()


def test_too_many_connections_without_a_lease_close_the_oldest_and_no_lease(sockets: LeaseServer) -> None:
    with contextlib.ExitStack() as stack:
        leasing = stack.enter_context(connect(sockets))
        _, (fd,) = ask(leasing, NBYTES)
        os.close(fd)
        first = stack.enter_context(connect(sockets))
        for _ in range(leases.MAX_WITHOUT_LEASE):
            last = stack.enter_context(connect(sockets))
        assert first.recv(1) == b""
        _, (fd,) = ask(last, NBYTES)
        os.close(fd)
        leasing.send(IS_IN_USE)
        assert leasing.recv(1) == NOT_IN_USE


def test_regions_are_no_more_than_descriptors_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bngrad_server.memory.regions._MAX_REGIONS", 2)
    with contextlib.ExitStack() as stack:
        regions = Regions(4 * NBYTES, lambda region: None, lambda region: None)
        sockets = stack.enter_context(serving(regions))
        clients = [stack.enter_context(connect(sockets)) for _ in range(3)]
        for client in clients[:2]:
            _, (fd,) = ask(client, 1)
            os.close(fd)
        assert ask(clients[2], 1) == (b"no more than 2 regions are leased at once", [])
        clients[0].close()
        wait_until(lambda: len(regions) == 1)
        _, (fd,) = ask(stack.enter_context(connect(sockets)), 1)
        os.close(fd)


@pytest.mark.skipif(
    tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) < (6, 16), reason="Linux can refuse them from 6.16 on"
)
@pytest.mark.parametrize("name", ["calls", "regions"])
def test_clients_cannot_send_descriptors_which_can_be_slow_to_close(sockets: LeaseServer, name: str) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(sockets.directory / name))
        with pytest.raises(PermissionError):
            socket.send_fds(client, [b"?"], [client.fileno()])


class Rests:
    """Stands in for `time.sleep`; notes how long the thread that leases regions is to rest.

    Attributes:
        seconds: All rests that have begun.
        may_end: Cleared to have the thread rest until it is set again.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.may_end = threading.Event()
        self.may_end.set()
        self.is_held = False
        self._sleep = time.sleep

    def __call__(self, seconds: float) -> None:
        if threading.current_thread().name != "leases":
            self._sleep(seconds)
            return
        self.seconds.append(seconds)
        self.is_held = not self.may_end.is_set()
        self.may_end.wait(TIMEOUT_S)


@pytest.fixture
def rests(monkeypatch: pytest.MonkeyPatch) -> Rests:
    rests = Rests()
    monkeypatch.setattr("bngrad_server.memory.leases.time.sleep", rests)
    return rests


def test_the_thread_rests_four_times_as_long_as_a_flood_of_requests_occupies_it(regions: Regions, rests: Rests) -> None:
    with serving(regions) as sockets, connect(sockets) as client:
        _, (fd,) = ask(client, NBYTES)
        os.close(fd)
        (thread,) = (each for each in threading.enumerate() if each.name == "leases")
        assert thread.ident is not None
        clock = time.pthread_getcpuclockid(thread.ident)
        spent, rested = time.clock_gettime(clock), sum(rests.seconds)
        for _ in range(2000):
            client.send(IS_IN_USE)
            assert client.recv(1) == NOT_IN_USE
        rests_s = sum(rests.seconds)
        all_spent = time.clock_gettime(clock)
        assert rests_s - rested > 3 * (all_spent - spent)
        assert rests_s <= 4 * all_spent


def test_while_no_connection_can_be_accepted_the_thread_rests(
    regions: Regions, rests: Rests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "_LONGEST_REST_S", 0.05)
    with serving(regions) as sockets, socket.socket(socket.AF_UNIX) as client:
        address = str(sockets.directory / "regions")
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            client.connect(address)
            wait_until(lambda: max(rests.seconds, default=0.0) > leases._LONGEST_REST_S)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        client.settimeout(TIMEOUT_S)
        _, (fd,) = ask(client, NBYTES)
        os.close(fd)


@pytest.mark.usefixtures("alone")
def test_a_connection_that_the_system_cannot_watch_is_closed_and_others_go_on(
    regions: Regions, sockets: LeaseServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(selector: selectors.BaseSelector, file: socket.socket, events: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(leases, "MAX_WITHOUT_LEASE", 4)
    with contextlib.ExitStack() as stack:
        with monkeypatch.context() as failing:
            failing.setattr(selectors.DefaultSelector, "register", fail)
            unwatched = stack.enter_context(connect(sockets))
            assert unwatched.recv(1) == b""
        *_, client = (stack.enter_context(connect(sockets)) for _ in range(6))  # the first of which are closed
        _, (fd,) = ask(client, NBYTES)
        os.close(fd)


@pytest.mark.usefixtures("alone")
def test_a_message_of_a_connection_that_was_closed_for_a_new_one_is_ignored(
    regions: Regions, rests: Rests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "MAX_WITHOUT_LEASE", 4)
    with serving(regions) as sockets, contextlib.ExitStack() as stack:
        leasing = stack.enter_context(connect(sockets))
        _, (fd,) = ask(leasing, NBYTES)
        os.close(fd)
        leasing.send(IS_IN_USE)
        assert leasing.recv(1) == NOT_IN_USE
        oldest, *_ = (stack.enter_context(connect(sockets)) for _ in range(4))
        wait_until(lambda: len(sockets._leases) == 5)
        rests.may_end.clear()
        leasing.send(IS_IN_USE)
        wait_until(lambda: rests.is_held)
        client = stack.enter_context(connect(sockets))  # the thread sees both at once, in this order
        oldest.send(struct.pack("<Q", NBYTES))
        rests.may_end.set()
        _, (fd,) = ask(client, NBYTES)
        os.close(fd)
    wait_until(lambda: regions.nbytes == 0)


def test_a_connection_leases_one_region_alone(regions: Regions, sockets: LeaseServer) -> None:
    with connect(sockets) as client:
        _, (fd,) = ask(client, NBYTES)
        os.close(fd)
        client.send(struct.pack("<Q", NBYTES))
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""
    wait_until(lambda: regions.nbytes == 0)


def test_a_client_that_reads_no_answers_is_closed_and_delays_no_other(regions: Regions, sockets: LeaseServer) -> None:
    with connect(sockets) as deaf, connect(sockets) as other:
        _, (fd,) = ask(deaf, NBYTES)
        os.close(fd)
        with pytest.raises(ConnectionError):
            ask_for_ever(deaf)
        answer, fds = ask(other, NBYTES)
        assert len(answer) == 16
        os.close(*fds)


def ask_for_ever(client: socket.socket) -> None:
    """Asks one question after the other, each once the last one has been read, and reads no answer."""
    while True:
        client.send(IS_IN_USE)
        wait_until(lambda: not unread_nbytes(client))


def unread_nbytes(sock: socket.socket) -> int:
    """How much memory the system keeps for what the other end has not read yet."""
    return int.from_bytes(fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)), "little")
