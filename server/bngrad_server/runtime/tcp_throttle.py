"""Slows down TCP connections that send far more than their calls explain, where a library owns the sockets.

grpcio answers millions of frames a second that belong to no call, and offers no limit. But the kernel counts what each
connection has received, and a socket filter pauses a connection without costing anything: its peer has to wait, as if
packets were lost. A connection that has sent more than its share, and begun no op when its pause is over, is shut down:
to go on would mean to answer what has piled up at its peer, who may be gone.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from bngrad_server.runtime.traffic_accounts import Account, Excess, Peer

logger = logging.getLogger(__name__)

_FREE_NBYTES = 2**16
"""What a connection may send before its first op: its handshake, metadata, a health check now and then."""
_STRANGER_RATE = 2.0**10
"""Bytes a second that it may send beside that, over its whole life, such as pings: a flood that is as slow is none."""
_STRANGERS_RATE = 2.0**16
"""Bytes a second that all strangers of a host may send together."""
_STRANGERS_NBYTES = 2.0**22
"""How much all strangers of a host may send at once."""
_WINDOW_UPDATES = 1 / 16
"""What a peer may send for each byte that it receives."""
_PAUSE_S = 2.0
_SHUT_DOWNS = 3
"""How many connections are shut down in a look: grpcio takes a third of a millisecond for each, and calls wait."""
_QUIET_S = 5.0
_INTERVAL_S, _BUSY_INTERVAL_S = 0.25, 0.05
_LEAST_SLEEP = 20
"""The thread sleeps at least this many times as long as it computes."""

_ATTACH_FILTER, _DETACH_FILTER = 26, 27
_NOTHING_PASSES = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
_FILTER = struct.pack("@HP", 1, ctypes.addressof(_NOTHING_PASSES))
_TRAFFIC = struct.Struct("@QQ")
_TRAFFIC_OFFSET = 120
"""Where tcpi_bytes_acked and tcpi_bytes_received stand in `struct tcp_info`."""


class _Watched:
    """A connection, as the kernel sees it.

    Attributes:
        inode: The number of its socket, which tells it from later ones with the same descriptor.
        family: The family of its addresses.
        name: grpcio's name for it.
        peer: What its calls say.
        since: When it was seen first.
        received: Bytes received so far.
        acked: Bytes sent and acknowledged so far.
        useful: Bytes of messages at the last look.
        resume_at: When its pause ends; None while it has none.
    """

    def __init__(self, inode: int, family: int, name: str, peer: Peer, since: float) -> None:
        self.inode = inode
        self.family = family
        self.name = name
        self.peer = peer
        self.since = since
        self.received = self.acked = self.useful = 0
        self.resume_at: float | None = None


class TcpThrottle:
    """The connections to some TCP ports of this process, and the thread that looks at them.

    Attributes:
        ports: The ports; to be filled before `start`.
    """

    def __init__(self, max_message_nbytes: int, max_client_nbytes: int = 0) -> None:
        """Looks at no port yet.

        Args:
            max_message_nbytes: The most bytes of a message of an op.
            max_client_nbytes: The most bytes of all messages of a client at once; 0 for no limit.
        """
        self.ports: set[int] = set()
        self._max_message_nbytes = max_message_nbytes
        self._max_client_nbytes = max(max_client_nbytes, max_message_nbytes) if max_client_nbytes else math.inf
        self._peers: dict[str, Peer] = {}
        self._mutex = threading.Lock()
        self._connections: dict[int, _Watched] = {}  # by descriptor
        self._others: dict[int, int] = {}  # inodes of other descriptors
        self._accounts: dict[str, Account] = {}
        self._strangers: dict[str, tuple[float, float]] = {}  # by host: what they may send, and when that was so
        self._paused_at = float("-inf")
        self._shut_downs = 0  # in the current look
        self._refused: set[str] = set()  # clients, since the last look
        self._is_blind = False
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tcp-throttle", daemon=True)

    def start(self) -> None:
        """Starts the thread, if there are ports to look at."""
        if self.ports:
            self._thread.start()

    def close(self) -> None:
        """Ends the thread, and all pauses."""
        self._closing.set()
        self._wake.set()

    def refused(self, name: str, client: str) -> None:
        """Soon pauses the connections of a client whose call was refused as a waste of time.

        So it does with those that the client opens while the pause lasts. ``name`` is the peer of the call.
        """
        self.peer(name).account = client
        with self._mutex:
            self._refused.add(client)
        self._wake.set()

    def peer(self, name: str) -> Peer:
        """Returns the peer of a call, by grpcio's name for it, such as ``ipv4:127.0.0.1:50051``."""
        with self._mutex:
            peer = self._peers.get(name)
            if peer is None:
                peer = self._peers[name] = Peer(name)
            return peer

    def _run(self) -> None:
        interval_s, least_s = _INTERVAL_S, 0.0
        while not self._closing.wait(least_s):
            self._wake.wait(interval_s - least_s)
            self._wake.clear()
            began = time.thread_time()  # the thread's own: on a busy machine it must not look more rarely
            self._look_if_possible()
            cost_s = time.thread_time() - began
            wanted_s = _BUSY_INTERVAL_S if time.monotonic() - self._paused_at < _QUIET_S else _INTERVAL_S
            least_s = _LEAST_SLEEP * cost_s
            interval_s = max(wanted_s, least_s)
        for connection in self._connections.values():
            connection.resume_at = connection.resume_at and 0.0  # long ago
        self._look_if_possible()

    def _look_if_possible(self) -> None:
        """Looks at all connections; the next look makes up for one that fails."""
        try:
            self.look()
        except OSError as error:
            if not self._is_blind:
                logger.error("cannot look for floods until there are descriptors again: %s", error)
            self._is_blind = True
        except Exception:
            with suppress(MemoryError):
                logger.exception("a look for floods failed")
        else:
            self._is_blind = False

    def look(self) -> None:
        """Looks at all connections, pauses those that send too much, and ends the pauses that are over.

        Raises:
            OSError: No descriptor is left; nothing has changed.
        """
        fds = set(map(int, os.listdir("/proc/self/fd")))
        now = time.monotonic()
        seen: set[int] = set()
        self._shut_downs = 0
        with self._mutex:
            refused, self._refused = self._refused, set()
        for client in refused:
            self._account(client, now).pause(now)
        for fd in fds:
            with suppress(OSError):  # it was closed meanwhile
                inode = os.fstat(fd).st_ino
                connection = self._connections.get(fd)
                if self._others.get(fd) == inode:
                    continue
                if connection is None or connection.inode != inode:
                    connection = self._identified(fd, inode, now)
                if connection is not None:
                    self._connections[fd] = connection
                    seen.add(fd)
                    self._look_at(fd, connection, now)
        self._connections = {fd: connection for fd, connection in self._connections.items() if fd in seen}
        self._others = {fd: self._others[fd] for fd in fds - seen if fd in self._others}
        self._settle({connection.peer.account for connection in self._connections.values()}, now)
        self._strangers = {host: level for host, level in self._strangers.items() if now - level[1] < _QUIET_S}
        names = {connection.name for connection in self._connections.values()}
        with self._mutex:
            self._peers = {
                name: peer for name, peer in self._peers.items() if name in names or peer.waiting or peer.receiving
            }

    def _identified(self, fd: int, inode: int, now: float) -> _Watched | None:
        """Returns a connection to one of the ports that was not seen before; remembers any other descriptor."""
        try:
            with _borrowed(fd) as sock:
                name = self._name_of(sock)
                family = sock.family
        except OSError:  # it is no socket
            name = None
        if name is None:
            self._others[fd] = inode
            return None
        return _Watched(inode, family, name, self.peer(name), now)

    def _name_of(self, sock: socket.socket) -> str | None:
        """Returns grpcio's name for the peer of a connection to one of the ports; None for any other socket."""
        own = sock.getsockname()
        if not isinstance(own, tuple) or own[1] not in self.ports:
            return None
        host, port, *_ = sock.getpeername()
        host = host.removeprefix("::ffff:") if "." in host else host
        if ":" not in host:
            return f"ipv4:{host}:{port}"
        scoped = host.replace("%", "%25")
        return f"ipv6:%5B{scoped}%5D:{port}"

    def _look_at(self, fd: int, connection: _Watched, now: float) -> None:
        peer = connection.peer
        account = self._account(peer.account, now) if peer.account else None
        if account is not None:
            account.waiting += peer.waiting
            account.receiving += peer.receiving
        if connection.resume_at is not None and now < connection.resume_at:
            return
        if account is not None and now < account.paused_until and not self._closing.is_set():
            self._pause(fd, connection.name, now, account.paused_until - now)
            return
        with _borrowed(fd, connection.family) as sock:
            if connection.resume_at is not None and not self._end_pause(sock, connection, now):
                return
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TRAFFIC_OFFSET + _TRAFFIC.size)
            if len(info) < _TRAFFIC_OFFSET + _TRAFFIC.size:  # QEMU gives programs that it emulates four bytes
                return
            acked, received = _TRAFFIC.unpack_from(info, _TRAFFIC_OFFSET)
            useful, sent = peer.useful, received - connection.received
            earned = 2 * (useful - connection.useful) + _WINDOW_UPDATES * (acked - connection.acked)
            connection.received, connection.acked, connection.useful = received, acked, useful
            if account is not None:
                account.excesses.append(Excess(fd, connection.name, sent - earned))
            elif sent and received > _FREE_NBYTES and self._draw(connection.name.rpartition(":")[0], sent, now) < 0:
                self._pause(fd, connection.name, now, _PAUSE_S)

    def _end_pause(self, sock: socket.socket, connection: _Watched, now: float) -> bool:
        """Resumes a connection and returns true; or shuts it down if it has sent more than its share without ops."""
        share = _FREE_NBYTES + _STRANGER_RATE * (now - connection.since)
        has_flooded = not connection.peer.account and connection.received > share and not self._closing.is_set()
        if has_flooded and self._shut_downs == _SHUT_DOWNS:
            return False
        sock.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)
        connection.resume_at = None
        if has_flooded:
            self._shut_downs += 1
            sock.shutdown(socket.SHUT_RDWR)  # the system resets it once more arrives
        return not has_flooded

    def _account(self, name: str, now: float) -> Account:
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = Account(now)
        return account

    def _settle(self, accounts: set[str], now: float) -> None:
        """Settles all accounts, and forgets those that matter no more."""
        for name, account in list(self._accounts.items()):
            excesses = account.settle(now, self._max_message_nbytes, self._max_client_nbytes)
            if excesses:
                pause_s = account.strike(now)
                for excess in excesses:
                    self._pause(excess.fd, excess.name, now, pause_s)
            if name not in accounts and not account.strikes(now):
                del self._accounts[name]

    def _draw(self, host: str, nbytes: float, now: float) -> float:
        """Takes bytes from what the strangers of a host may send, and returns what is left."""
        level, since = self._strangers.get(host, (_STRANGERS_NBYTES, now))
        level = min(max(level, 0.0) + _STRANGERS_RATE * (now - since), _STRANGERS_NBYTES) - nbytes
        self._strangers[host] = level, now
        return level

    def _pause(self, fd: int, name: str, now: float, pause_s: float) -> None:
        if self._closing.is_set():
            return
        if now - self._paused_at > _QUIET_S:
            logger.warning("slowing down %s: it sends far more than its calls explain", name)
        self._paused_at = now
        # Another connection may have this descriptor meanwhile; a duplicate belongs to one for good.
        with suppress(OSError), _duplicate(fd) as same:
            if self._name_of(same) == name:
                same.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, _FILTER)
                self._connections[fd].resume_at = now + pause_s


@contextmanager
def _borrowed(fd: int, family: int | None = None) -> Iterator[socket.socket]:
    """Lends a descriptor as a socket, without owning it; that of a connection costs less if its family is known."""
    sock = socket.socket(fileno=fd) if family is None else socket.socket(family, socket.SOCK_STREAM, 0, fd)
    try:
        yield sock
    finally:
        sock.detach()


@contextmanager
def _duplicate(fd: int) -> Iterator[socket.socket]:
    """Duplicates a socket; unlike `socket.dup`, which makes both block, and with them threads of grpcio."""
    fd = os.dup(fd)
    try:
        with _borrowed(fd) as duplicate:
            yield duplicate
    finally:
        os.close(fd)
