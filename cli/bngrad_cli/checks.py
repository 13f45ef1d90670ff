"""What ``bngrad check`` looks at once a server is healthy."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Iterator

import bngrad
from bngrad_cli.commands.check import DoesNotApplyError, Step
from bngrad_cli.sample_requests import DTYPES, Request, random_request
from bngrad_cli.target import Target, TargetError
from bngrad_kernels.problem import Array
from bngrad_wire import __version__

Answer = tuple[Array, ...]

_SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "V3": {"NHWC": (3, 5, 4, 7), "NCHW": (3, 7, 5, 4), "NDHWC": (2, 3, 5, 4, 7), "NCDHW": (2, 7, 3, 5, 4)},
    "V2": {"NHWC": (3, 5, 4, 8), "NCHW": (3, 8, 5, 4)},
    "oneDNN": {"NXC": (6, 5, 7), "NCX": (6, 7)},
    "GradGrad": {"NHWC": (3, 5, 4, 7), "NCHW": (3, 7, 5, 4)},
}
_TIMED_SECONDS = 0.3


def steps() -> dict[str, Step]:
    """The steps by their names, in order."""
    answers: list[Answer] = []
    return {
        "server": _server,
        "unary": functools.partial(_round_trips, "unary", answers),
        "stream": functools.partial(_round_trips, "stream", answers),
        "shared": functools.partial(_shared, answers),
        "latency": _latency,
    }


def _server(target: Target) -> str:
    """Which version it is, and whether there is a device that is ready."""
    with target.client() as client:
        info = client.server_info()
    ready = [device.name for device in info.devices if device.state == "ready"]
    if not ready:
        raise TargetError(f"{target.address} has no device that is ready: its log says why its workers ended")
    version = info.version if info.version == __version__ else f"{info.version} (the client is {__version__})"
    restarts = sum(device.restarts for device in info.devices)
    return f"bngrad {version}; {len(ready)} of {len(info.devices)} devices ready, restarted {restarts} times"


def _round_trips(transport: str, answers: list[Answer], target: Target) -> str:
    """Whether every answer is right, and the same over every way.

    Args:
        transport: As `bngrad.Client` takes it.
        answers: Those over the first way; it makes them if there are none.
        target: The server.
    """
    requests = list(_requests())
    with target.client(transport=transport) as client:
        got = [request.send(client) for request in requests]
    answers[:] = answers or got
    for request, answer, first in zip(requests, got, answers, strict=True):
        where = f"{request.op} {request.data_format} {request.spec.dtype} over {transport}"
        if not request.is_right(answer):
            raise TargetError(
                f"a wrong answer to {where}: the server, or what it computes on, is broken; do not use it"
            )
        if any(ours.tobytes() != others.tobytes() for ours, others in zip(answer, first, strict=True)):
            raise TargetError(f"an answer to {where} has other bits than over another way: please report it")
    return f"{len(requests)} requests of every op, type and layout answered right"


def _shared(answers: list[Answer], target: Target) -> str:
    try:
        return _round_trips("shared", answers, target)
    except TargetError as error:
        if isinstance(error.__cause__, bngrad.UnavailableError):
            raise DoesNotApplyError(str(error.__cause__)) from error
        raise


def _latency(target: Target) -> str:
    """How long a small request takes, over the way that the client chooses."""
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


def _requests() -> Iterator[Request]:
    for op, shapes in _SHAPES.items():
        for data_format, shape in shapes.items():
            for dtype in DTYPES.values():
                yield random_request(op, data_format, dtype, shape)
