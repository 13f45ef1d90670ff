"""The steps of ``bngrad check`` after the server's health."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import bngrad
from bngrad.typing import Transport
from bngrad_cli.sample_requests import DTYPES, SampleRequest, random_request
from bngrad_cli.target import NotOfferedError, Target, TargetError
from bngrad_kernels.problem import Array
from bngrad_wire import __version__
from bngrad_wire.printable import counted

Outputs = tuple[Array, ...]

_SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "V3": {"NHWC": (3, 5, 4, 7), "NCHW": (3, 7, 5, 4), "NDHWC": (2, 3, 5, 4, 7), "NCDHW": (2, 7, 3, 5, 4)},
    "V2": {"NHWC": (3, 5, 4, 8), "NCHW": (3, 8, 5, 4)},
    "oneDNN": {"NXC": (6, 5, 7), "NCX": (6, 7)},
    "GradGrad": {"NHWC": (3, 5, 4, 7), "NCHW": (3, 7, 5, 4)},
}
_LONG_SHAPES: dict[str, dict[str, list[tuple[int, ...]]]] = {
    "V3": {
        "NHWC": [(4, 32, 36, 64), (6, 100, 99, 5), (8, 7, 7, 512)],
        "NCHW": [(3, 7, 112, 112), (2, 9, 121, 135), (32, 128, 7, 7)],
        "NDHWC": [(2, 6, 20, 20, 48)],
        "NCDHW": [(2, 24, 6, 30, 30)],
    },
    "V2": {"NHWC": [(2, 60, 60, 40)], "NCHW": [(2, 40, 60, 60)]},
    "oneDNN": {"NXC": [(8, 500, 64)], "NCX": [(500, 512)]},
    "GradGrad": {
        "NHWC": [(4, 32, 36, 64), (6, 100, 99, 5), (8, 7, 7, 512)],
        "NCHW": [(3, 7, 112, 112), (2, 9, 121, 135), (32, 128, 7, 7)],
    },
}
"""They reach every kernel of CPUs and GPUs, and their inputs fit a message of 4 MiB."""
_LARGE_SHAPES = {"NHWC": (16, 56, 56, 64), "NCHW": (16, 64, 56, 56)}
_AT_ONCE = 16
_TIMED_SECONDS = 0.3


def steps(*, is_long: bool) -> dict[str, Callable[[Target], str]]:
    """Returns the steps by their names, in order; see `bngrad_cli.commands.check.Step`.

    Args:
        is_long: Whether to send larger requests too, in training and in inference, and all of them at once.
    """
    expected: list[Outputs] = []
    found: dict[str, Callable[[Target], str]] = {
        "server": _server,
        "unary": functools.partial(_round_trips, "unary", expected, is_long=is_long),
        "stream": functools.partial(_round_trips, "stream", expected, is_long=is_long),
        "shared": functools.partial(_shared, expected, is_long=is_long),
    }
    if is_long:
        found |= {"at once": functools.partial(_at_once, expected), "large": _large}
    return found | {"latency": _latency}


def _server(target: Target) -> str:
    """Tells the version, and fails without a ready device."""
    with target.client() as client:
        info = client.server_info()
    ready = [device.name for device in info.devices if device.state == "ready"]
    if not ready:
        raise TargetError(f"{target.address} has no ready device: its log says why its workers ended")
    version = info.version if info.version == __version__ else f"{info.version} (the client is {__version__})"
    restarts = sum(device.restarts for device in info.devices)
    devices = counted(len(info.devices), "device")
    return f"bngrad {version}; {len(ready)} of {devices} ready, restarted {counted(restarts, 'time')}"


def _round_trips(transport: Transport, expected: list[Outputs], target: Target, *, is_long: bool) -> str:
    """Fails unless every result is right, and has the bits ``expected``, which the first transport's step fills in."""
    requests = _requests(is_long=is_long)
    try:
        with target.client(transport=transport) as client:
            got = [request.send(client) for request in requests]
    except TargetError as error:
        if isinstance(error.__cause__, bngrad.DeadlineExceededError):
            _explain_by_compiling(target, error)
        raise
    _compare(requests, got, expected, f"over {transport}")
    expected[:] = got
    return f"{len(requests)} requests of every op, type and layout answered right"


def _explain_by_compiling(target: Target, error: TargetError) -> None:
    """Raises an error that says more if the server still compiles kernels."""
    with target.client() as client:
        compiling = client.server_info().compiling
    if compiling:
        advice = "try again later, or give a longer --timeout"
        raise TargetError(f"{error}; it is still compiling {', '.join(compiling)}: {advice}") from error


def _shared(expected: list[Outputs], target: Target, *, is_long: bool) -> str:
    try:
        return _round_trips("shared", expected, target, is_long=is_long)
    except TargetError as error:
        if isinstance(error.__cause__, bngrad.UnavailableError):
            raise NotOfferedError(str(error.__cause__)) from error
        raise


def _at_once(expected: list[Outputs], target: Target) -> str:
    """Sends all requests from several threads, so that the server computes some of them in one batch."""
    requests = _requests(is_long=True)
    with target.client() as client, ThreadPoolExecutor(_AT_ONCE) as pool:
        got = list(pool.map(lambda request: request.send(client), requests))
    _compare(requests, got, expected, "at once with others")
    return f"the same requests, {_AT_ONCE} at a time, have the same bits"


def _large(target: Target) -> str:
    """Sends requests of 19 to 64 MB, which messages and some servers are too small for."""
    count = 0
    try:
        for op, (data_format, shape), dtype in itertools.product(
            ("V3", "GradGrad"), _LARGE_SHAPES.items(), DTYPES.values()
        ):
            request = random_request(op, data_format, dtype, shape)
            with target.client() as client:
                _compare([request], [request.send(client)], [], "of a large tensor")
            count += 1
    except TargetError as error:
        cause = error.__cause__
        if isinstance(cause, bngrad.ResourceExhaustedError) and cause.retry_delay_s is None:
            raise NotOfferedError(str(cause)) from error
        raise
    return f"{count} requests of large tensors answered right"


def _compare(requests: Sequence[SampleRequest], got: Sequence[Outputs], expected: Sequence[Outputs], how: str) -> None:
    """Fails unless every result is right, and has the bits of ``expected``, if there are any, which are right."""
    for request, outputs, first in zip(requests, got, expected or got, strict=True):
        where = f"{request.op} {request.data_format} {request.spec.dtype} {how}"
        is_same = all(ours.tobytes() == others.tobytes() for ours, others in zip(outputs, first, strict=True))
        if not (expected and is_same) and not request.is_right(outputs):
            raise TargetError(f"a wrong answer to {where}: the server or its hardware is broken; do not use it")
        if not is_same:
            raise TargetError(f"an answer to {where} has other bits than the first one: please report it")


def _latency(target: Target) -> str:
    """Measures a small request over the transport that the client chooses."""
    request = _requests(is_long=False)[0]
    times: list[float] = []
    with target.client() as client:
        request.send(client)
        while sum(times) < _TIMED_SECONDS:
            begin = time.perf_counter()
            request.send(client)
            times.append(time.perf_counter() - begin)
        remark = ", while the server compiles its kernels" if client.server_info().compiling else ""
    p99 = sorted(times)[int(0.99 * len(times))]
    return f"a small request takes {1e3 * statistics.median(times):.2f} ms (median), {1e3 * p99:.2f} ms (p99){remark}"


@functools.cache
def _requests(*, is_long: bool) -> list[SampleRequest]:
    small = [
        random_request(op, data_format, dtype, shape)
        for op, shapes in _SHAPES.items()
        for data_format, shape in shapes.items()
        for dtype in DTYPES.values()
    ]
    if not is_long:
        return small
    return small + [
        replace(random_request(op, data_format, dtype, shape), is_training=is_training)
        for op, formats in _LONG_SHAPES.items()
        for data_format, shapes in formats.items()
        for shape, dtype in itertools.product(shapes, DTYPES.values())
        for is_training in ((True,) if op == "oneDNN" else (True, False))
    ]
