"""What both clients take to reach a server."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Iterable, Sequence
from typing import Any, Literal, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt

from bngrad._errors import FieldViolation, invalid_argument

ChannelOption: TypeAlias = tuple[str, Any]
Transport: TypeAlias = Literal["auto", "unary", "stream", "shared"]
TRANSPORTS: tuple[Transport, ...] = ("auto", "unary", "stream", "shared")

DEFAULT_TIMEOUT_S = 60.0

_DEFAULT_OPTIONS: dict[str, Any] = {
    "grpc.max_send_message_length": -1,
    "grpc.max_receive_message_length": -1,
    # A proxy for the web, from the environment, would be asked for localhost too.
    "grpc.enable_http_proxy": 0,
    # A server that comes back gets its calls soon; grpcio itself would wait for up to two minutes.
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 1000,
    # What grpcio understands as the longest that connecting may take.
    "grpc.min_reconnect_backoff_ms": 5000,
}


def channel_options(options: Iterable[ChannelOption]) -> list[ChannelOption]:
    """The options of a channel: ours, then the caller's, of which the last of a name counts."""
    return list({**_DEFAULT_OPTIONS, **dict(options)}.items())


def check_transport(transport: Transport) -> Transport:
    """The transport, if it is one."""
    if transport not in TRANSPORTS:
        names = ", ".join(map(repr, TRANSPORTS[:-1]))
        description = f"transport must be {names} or {TRANSPORTS[-1]!r}, not {transport!r}"
        raise invalid_argument(FieldViolation("transport", description))
    return transport


def check_retries(retries: bool) -> bool:
    """The switch, if it is one."""
    if not isinstance(retries, bool):
        raise TypeError(f"retries must be a bool, not {retries!r}")
    return retries


def check_options(options: Iterable[ChannelOption]) -> list[ChannelOption]:
    """The channel arguments, if they are pairs; their values are grpcio's to judge."""
    pairs = list(options) if isinstance(options, Iterable) else [options]
    if not all(isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs):
        raise TypeError(f'options must be pairs such as ("grpc.keepalive_time_ms", 30_000), not {options!r}')
    return pairs


def check_timeout(timeout: float) -> float:
    """The timeout, if it is one."""
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real):
        raise TypeError(f"timeout must be a number of seconds, not {timeout!r}")
    try:
        seconds = float(timeout)
    except OverflowError as error:
        description = "timeout must be a number of seconds that a float can be, or math.inf for no limit"
        raise invalid_argument(FieldViolation("timeout", description)) from error
    if not seconds > 0:  # NaN is not either.
        raise invalid_argument(FieldViolation("timeout", f"timeout must be positive, not {timeout}"))
    return seconds


def check_shape(shape: SupportsIndex | Sequence[SupportsIndex]) -> tuple[int, ...]:
    """The lengths of the dimensions, of which a single one may stand alone."""
    dimensions = shape if isinstance(shape, Sequence) else (shape,)
    try:
        lengths = tuple(map(operator.index, dimensions))
    except TypeError as error:
        raise TypeError(f"shape must be an int or a sequence of such, not {shape!r}") from error
    if max(map(abs, lengths), default=0) >= 2**63:  # and may be too long to print
        raise invalid_argument(FieldViolation("shape", "shape must have lengths below 2**63, not above"))
    if min(lengths, default=0) < 0:
        raise invalid_argument(FieldViolation("shape", f"shape must have no negative lengths, not {lengths}"))
    return lengths


def check_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """The dtype, if memory that others write can hold such elements."""
    try:
        made = np.dtype(dtype)
    except (TypeError, ValueError, SyntaxError) as error:
        raise TypeError(f"dtype must be one of NumPy's, not {dtype!r}") from error
    if made.hasobject:
        raise invalid_argument(FieldViolation("dtype", f"dtype must be one without Python objects, not {made}"))
    return made
