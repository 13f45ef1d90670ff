"""The steps of ``bngrad check`` after the server's health."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator

import bngrad
from bngrad_cli.sample_requests import DTYPES, SampleRequest, random_request
from bngrad_cli.target import NotOfferedError, Target, TargetError
from bngrad_kernels.problem import Array
from bngrad_wire import __version__

Outputs = tuple[Array, ...]

_SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "V3": {"NHWC": (3, 5, 4, 7), "NCHW": (3, 7, 5, 4), "NDHWC": (2, 3, 5, 4, 7), "NCDHW": (2, 7, 3, 5, 4)},
    "V2": {"NHWC": (3, 5, 4, 8), "NCHW": (3, 8, 5, 4)},
    "oneDNN": {"NXC": (6, 5, 7), "NCX": (6, 7)},
    "GradGrad": {"NHWC": (3, 5, 4, 7), "NCHW": (3, 7, 5, 4)},
}
_TIMED_SECONDS = 0.3


def steps() -> dict[str, Callable[[Target], str]]:
    """Returns the steps by their names, in order; see `bngrad_cli.commands.check.Step`."""
    expected: list[Outputs] = []
    return {
        "server": _server,
        "unary": functools.partial(_round_trips, "unary", expected),
        "stream": functools.partial(_round_trips, "stream", expected),
        "shared": functools.partial(_shared, expected),
        "latency": _latency,
    }


def _server(target: Target) -> str:
    """Tells the version, and fails without a ready device."""
    with target.client() as client:
        info = client.server_info()
    ready = [device.name for device in info.devices if device.state == "ready"]
    if not ready:
        raise TargetError(f"{target.address} has no ready device: its log says why its workers ended")
    version = info.version if info.version == __version__ else f"{info.version} (the client is {__version__})"
    restarts = sum(device.restarts for device in info.devices)
    return f"bngrad {version}; {len(ready)} of {len(info.devices)} devices ready, restarted {restarts} times"


def _round_trips(transport: str, expected: list[Outputs], target: Target) -> str:
    """Fails unless every result is right, and has the bits ``expected``, which the first transport's step fills in."""
    requests = list(_requests())
    with target.client(transport=transport) as client:
        got = [request.send(client) for request in requests]
    expected[:] = expected or got
    for request, outputs, first in zip(requests, got, expected, strict=True):
        where = f"{request.op} {request.data_format} {request.spec.dtype} over {transport}"
        if not request.is_right(outputs):
            raise TargetError(f"a wrong answer to {where}: the server or its hardware is broken; do not use it")
        if any(ours.tobytes() != others.tobytes() for ours, others in zip(outputs, first, strict=True)):
            raise TargetError(f"an answer to {where} has other bits than over another transport: please report it")
    return f"{len(requests)} requests of every op, type and layout answered right"


def _shared(expected: list[Outputs], target: Target) -> str:
    try:
        return _round_trips("shared", expected, target)
    except TargetError as error:
        if isinstance(error.__cause__, bngrad.UnavailableError):
            raise NotOfferedError(str(error.__cause__)) from error
        raise


def _latency(target: Target) -> str:
    """Measures a small request over the transport that the client chooses."""
    request = next(_requests())
    times: list[float] = []
    with target.client() as client:
        request.send(client)
        while sum(times) < _TIMED_SECONDS:
            begin = time.perf_counter()
            request.send(client)
            times.append(time.perf_counter() - begin)
    p99 = sorted(times)[int(0.99 * len(times))]
    return f"a small request takes {1e3 * statistics.median(times):.2f} ms (median), {1e3 * p99:.2f} ms (p99)"


def _requests() -> Iterator[SampleRequest]:
    for op, shapes in _SHAPES.items():
        for data_format, shape in shapes.items():
            for dtype in DTYPES.values():
                yield random_request(op, data_format, dtype, shape)
