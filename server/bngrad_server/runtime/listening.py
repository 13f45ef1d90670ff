"""Finds out on what the server can listen, and limits descriptors and connections."""

from __future__ import annotations

import errno
import os
import resource
import socket
import stat
import tempfile
from contextlib import ExitStack
from pathlib import Path

from bngrad_server.errors import ListenError
from bngrad_wire import keepalive
from bngrad_wire.addresses import MAX_PATH_NBYTES, format_host_port

_MAX_CONNECTIONS = 4096
_OTHER_DESCRIPTORS = 2048
_LEAST_DESCRIPTORS, _MOST_DESCRIPTORS = 256, 1 << 16
"""With fewer, connections could take those that a new worker needs."""
_BACKLOG = 1024
_IDLE_S, _INTERVAL_S = 30, 10
"""After 70 s a connection ends whose client's host has gone: it would keep its place for ever."""
_TRIES = 16
"""For a port that is free on every address of a host."""
_MISSING = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}
"""The errors of an address that this machine does not have, such as ::1 where IPv6 is off."""


def raise_descriptor_limit() -> None:
    """Raises the limit of open files of this process and its workers: the usual soft limit is meant for `select`.

    Raises:
        OSError: It may not have enough.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < _LEAST_DESCRIPTORS:
        raise OSError(errno.EMFILE, f"a server needs {_LEAST_DESCRIPTORS} open files, and may have {hard}")
    if soft < min(hard, _MOST_DESCRIPTORS):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, _MOST_DESCRIPTORS), hard))


def max_connections() -> int:
    """Returns how many connections of TCP the server may have, and as many of Unix sockets.

    That leaves descriptors for everything else.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(_MAX_CONNECTIONS, max(soft - _OTHER_DESCRIPTORS, soft // 2) // 2)


def check_path(path: Path) -> None:
    """Checks that the server can listen on a Unix socket: it must not replace the socket of another server.

    Raises:
        ListenError: It cannot.
    """
    reason = _path_fault(path)
    if reason is not None:
        raise ListenError(f"cannot listen on unix:{path}: {reason}")


def bindable_addresses(host: str, port: int) -> list[tuple[str, int]]:
    """Returns the IP addresses of a host on which this machine can listen, each with the same port.

    ``localhost`` is often both 127.0.0.1 and ::1, and a client may know only one of them.

    Args:
        host: A name, or an IP address without brackets.
        port: 0 chooses a port that is free on every address.

    Raises:
        ListenError: There is none, or the port is taken on one of them.
    """
    for _ in range(_TRIES):
        try:
            return _bind_all(host, port)
        except OSError as error:
            reason = error.strerror
            if port or error.errno != errno.EADDRINUSE:
                break
        except UnicodeError:
            reason = "it names no host"
            break
    raise ListenError(f"cannot listen on {format_host_port(host, port)}: {reason}")


def tcp_listeners(host: str, port: int) -> list[socket.socket]:
    """Listens on the addresses of `bindable_addresses`, and at ``::`` for IPv4 too.

    Raises:
        ListenError: There is none, or the port is taken on one of them.
    """
    listeners = []
    with ExitStack() as opened:
        for address in bindable_addresses(host, port):
            family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
            dualstack = address[0] == "::" and socket.has_dualstack_ipv6()
            try:
                listener = socket.create_server(address, family=family, backlog=_BACKLOG, dualstack_ipv6=dualstack)
            except OSError as error:
                raise ListenError(f"cannot listen on {format_host_port(*address)}: {error.strerror}") from error
            keepalive.enable(listener, _IDLE_S, _INTERVAL_S)
            listeners.append(opened.enter_context(listener))
        opened.pop_all()
    return listeners


def unix_listener(path: Path, mode: int) -> socket.socket:
    """Listens on a Unix socket with these permissions, in place of one that another server has left.

    Raises:
        ListenError: The path is taken, or may not be used.
    """
    check_path(path)
    listener = socket.socket(socket.AF_UNIX)
    try:
        path.unlink(missing_ok=True)
        umask = os.umask(0o177)  # from its first moment, only this user can connect to the socket
        try:
            listener.bind(str(path))
        finally:
            os.umask(umask)
        path.chmod(mode)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ListenError(f"cannot listen on unix:{path}: {error.strerror}") from error
    return listener


def has_listener(path: Path) -> bool:
    """Tells whether a process listens on a Unix socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # or a full queue would block
        try:
            found = probe.connect_ex(str(path))
        except OSError:  # the path is too long for a socket
            return False
    return found not in {errno.ENOENT, errno.ENOTDIR, errno.ECONNREFUSED}


def _path_fault(path: Path) -> str | None:
    if len(os.fsencode(path)) > MAX_PATH_NBYTES:
        return f"a socket's path has at most {MAX_PATH_NBYTES} bytes"
    try:
        if not stat.S_ISDIR(_mode(path.parent)):
            return f"there is no folder {path.parent}"
        if (mode := _mode(path)) and not stat.S_ISSOCK(mode):
            return "the path exists and is not a socket"
        if has_listener(path):
            return "the address is taken"
        # At a name beside it, so that the socket of a server that starts at this moment stays.
        with tempfile.TemporaryDirectory(dir=path.parent):
            return None
    except OSError as error:
        return f"no socket can be made in {path.parent}: {error.strerror}"


def _mode(path: Path) -> int:
    """The mode of a file; 0 if there is none."""
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0


def _bind_all(host: str, port: int) -> list[tuple[str, int]]:
    """Binds a socket to each address of a host that this machine has, and closes them again."""
    found = dict.fromkeys((each[0], each[4]) for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    bound: list[tuple[str, int]] = []
    missing: OSError | None = None
    with ExitStack() as probes:
        for family, address in found:
            try:
                probe = probes.enter_context(socket.socket(family, socket.SOCK_STREAM))
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((address[0], port, *address[2:]))
            except OSError as error:
                if error.errno not in _MISSING:
                    raise
                missing = error
            else:
                if len(found) > 1:
                    port = probe.getsockname()[1]
                bound.append((str(address[0]), port))
    if missing is not None and not bound:
        raise missing
    return bound
