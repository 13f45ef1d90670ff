"""Checks the arguments that both clients take."""

from __future__ import annotations

import numbers
import operator
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Literal, SupportsIndex, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from bngrad._errors import FieldViolation, invalid_argument, is_encodable
from bngrad.typing import Transport
from bngrad_wire.addresses import MAX_PATH_NBYTES, MAX_PORT, host_and_port, unix_path

LOCAL = "local:"
"""The target that stands for the CPU of this process."""
ChannelOption: TypeAlias = tuple[str, Any]
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)

_DEFAULT_OPTIONS: dict[str, Any] = {
    "grpc.max_send_message_length": -1,
    "grpc.max_receive_message_length": -1,
    # `CallRunner` tries again. grpcio's own attempts can leave a streamed call without an end, beyond its deadline, too
    # (grpcio 1.85.1, messages of more than its buffer of 256 KiB, while the server is started again).
    "grpc.enable_retries": 0,
    # An HTTP proxy from the environment would be used for localhost too.
    "grpc.enable_http_proxy": 0,
    # grpcio itself would wait for up to two minutes before it connects to a server that is back.
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 1000,
    # Also grpcio's time limit for connecting.
    "grpc.min_reconnect_backoff_ms": 5000,
    # A call in flight to a host that has gone ends after ten seconds. Our servers take any number of pings; others that
    # do not tell grpcio, which then sends fewer.
    "grpc.keepalive_time_ms": 5000,
    "grpc.keepalive_timeout_ms": 5000,
    "grpc.http2.ping_timeout_ms": 5000,  # of pings that measure the connection's speed, which stand in for keepalive's
    "grpc.http2.max_pings_without_data": 0,
}

_NO_THREADS = (
    "{} has replaced Python's threads, which a client needs: leave them out of the patch, or use transport='unary'"
)
_DNS_SCHEME = re.compile("^dns:(///)?")
_SCHEMES = ("dns", "google-c2p", "ipv4", "ipv6", "unix", "unix-abstract", "vsock", "xds")
"""gRPC's own; it takes any other for a host, and adds a port of its own."""


def check_threads() -> None:
    """Refuses a process whose threads are no threads of the system: the client's would wait for each other for ever.

    Raises:
        RuntimeError: gevent or eventlet has replaced Python's threads.
    """
    gevent, eventlet = sys.modules.get("gevent.monkey"), sys.modules.get("eventlet.patcher")
    if gevent is not None and gevent.is_module_patched("threading"):
        raise RuntimeError(_NO_THREADS.format("gevent"))
    if eventlet is not None and eventlet.is_monkey_patched("thread"):
        raise RuntimeError(_NO_THREADS.format("eventlet"))


def check_targets(target: Sequence[str]) -> list[str]:
    """Returns the targets, each once, if all are valid."""
    targets = [target] if isinstance(target, str) else target
    if isinstance(targets, bytes) or not isinstance(targets, Sequence):
        raise TypeError(f"target must be a str, a sequence of str or a function that returns either, not {target!r}")
    for each in targets:
        if not isinstance(each, str):
            raise TypeError(f"target must be a str, not {each!r}")
        if not _is_target(each):
            description = f'target must be "HOST:PORT" or "unix:PATH", not {each!r}'
            raise invalid_argument(FieldViolation("target", description))
        path = unix_path(each)
        if path is not None and len(path.encode()) > MAX_PATH_NBYTES:
            description = f"target must have a path of at most {MAX_PATH_NBYTES} bytes, not {each!r}"
            raise invalid_argument(FieldViolation("target", description))
    if not targets:
        raise invalid_argument(FieldViolation("target", "target must name a server, not none"))
    return list(dict.fromkeys(targets))


def _is_target(target: str) -> bool:
    """Returns whether gRPC understands it as it is meant, not as some other host, port or path."""
    if "\0" in target or not is_encodable(target):
        return False
    if target == LOCAL:
        return True
    address = host_and_port_of(target)
    if address is not None:
        return 0 < address[1] <= MAX_PORT
    scheme, _, rest = target.partition(":")
    return scheme in _SCHEMES and rest.strip("/") != ""


def host_and_port_of(target: str) -> tuple[str, int] | None:
    """Returns the host, without brackets, and the port of ``HOST:PORT`` or ``dns:HOST:PORT``; None for others."""
    return host_and_port(target) or host_and_port(_DNS_SCHEME.sub("", target))


def channel_options(options: Iterable[ChannelOption]) -> list[ChannelOption]:
    """Returns the options of a channel: our defaults, then the caller's; the last of a name counts."""
    return list({**_DEFAULT_OPTIONS, **dict(options)}.items())


def check_transport(transport: Transport) -> Transport:
    """Returns the transport if it is one."""
    if transport not in TRANSPORTS:
        names = ", ".join(map(repr, TRANSPORTS[:-1]))
        description = f"transport must be {names} or {TRANSPORTS[-1]!r}, not {transport!r}"
        raise invalid_argument(FieldViolation("transport", description))
    return transport


def check_retries(retries: bool) -> bool:
    """Returns the argument if it is a bool."""
    if not isinstance(retries, bool):
        raise TypeError(f"retries must be a bool, not {retries!r}")
    return retries


def check_fallback(fallback: Literal["local"] | None) -> bool:
    """Returns whether calls that no server answers are computed in this process."""
    if fallback not in (None, "local"):
        description = f"fallback must be 'local' or None, not {fallback!r}"
        raise invalid_argument(FieldViolation("fallback", description))
    return fallback is not None


def check_options(options: Iterable[ChannelOption]) -> list[ChannelOption]:
    """Returns the channel arguments if they are pairs; grpcio checks their values."""
    pairs = list(options) if isinstance(options, Iterable) else [options]
    if not all(isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs):
        raise TypeError(f'options must be pairs such as ("grpc.keepalive_time_ms", 30_000), not {options!r}')
    return pairs


def check_timeout(timeout: float) -> float:
    """Returns the timeout in seconds if it is a positive number."""
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real):
        raise TypeError(f"timeout must be a number of seconds, not {timeout!r}")
    try:
        seconds = float(timeout)
    except OverflowError as error:
        description = "timeout must be a number of seconds that a float can be, or math.inf for no limit"
        raise invalid_argument(FieldViolation("timeout", description)) from error
    if not seconds > 0:  # also refuses NaN
        raise invalid_argument(FieldViolation("timeout", f"timeout must be positive, not {timeout}"))
    return seconds


def check_shape(shape: SupportsIndex | Sequence[SupportsIndex]) -> tuple[int, ...]:
    """Returns the lengths of the dimensions; a single one may be given as an int."""
    dimensions = shape if isinstance(shape, Sequence) else (shape,)
    try:
        lengths = tuple(map(operator.index, dimensions))
    except TypeError as error:
        raise TypeError(f"shape must be an int or a sequence of int, not {shape!r}") from error
    if max(map(abs, lengths), default=0) >= 2**63:  # and may be too long to print
        raise invalid_argument(FieldViolation("shape", "shape must have lengths below 2**63, not above"))
    if min(lengths, default=0) < 0:
        raise invalid_argument(FieldViolation("shape", f"shape must have no negative lengths, not {lengths}"))
    return lengths


def check_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """Returns the dtype if it has no Python objects, which shared memory cannot hold."""
    try:
        made = np.dtype(dtype)
    except (TypeError, ValueError, SyntaxError) as error:
        raise TypeError(f"dtype must be one of NumPy's, not {dtype!r}") from error
    if made.hasobject:
        raise invalid_argument(FieldViolation("dtype", f"dtype must be one without Python objects, not {made}"))
    return made
