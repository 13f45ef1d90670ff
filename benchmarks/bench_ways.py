"""Milliseconds of a call by each way to a server on this host, by the size of its tensors, which are ordinary arrays.

Where two columns cross, `bngrad._transports` should change from the one way to the other.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar
from unittest import mock

from benchmarks.transport import inputs
from benchmarks.warm_server import WarmServer

import bngrad
from bngrad._deadline import Cancellation, Deadline
from bngrad._requests.request import PreparedRequest
from bngrad._transports.grpcio import GrpcioTransport
from bngrad._transports.http2 import Http2Transport
from bngrad._transports.selector import TransportSelector

Result = TypeVar("Result")

_SIZES = "4KB", "32KB", "64KB", "128KB", "256KB", "512KB", "1MB", "2MB"
_WAYS = (
    "shared",
    "one message, Unix", "one message, TCP", "chunks, Unix", "chunks, TCP",
    "one message, grpcio", "chunks, grpcio",
)  # fmt: skip
_CALLS = 10
"""Calls of a turn, of which the first is not counted."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_ways", description=__doc__)
    parser.add_argument("--sizes", nargs="+", type=inputs.size, default=list(map(inputs.size, _SIZES)))
    parser.add_argument("--turns", type=int, default=30, help="of ten calls, of each way at each size")
    options = parser.parse_args()
    print(" | ".join(["tensor", *_WAYS]))
    with WarmServer() as server, bngrad.Client(server.target) as client:
        for nbytes in options.sizes:
            medians = _medians(client, nbytes, options.turns)
            cells = (f"{1e3 * median:.3f}".rjust(len(way)) for way, median in zip(_WAYS, medians, strict=True))
            print(" | ".join([inputs.label(nbytes).rjust(6), *cells]), flush=True)


def _medians(client: bngrad.Client, nbytes: int, turns: int) -> list[float]:
    """Returns the seconds of a call by each way; they take turns."""
    made = inputs.problem(nbytes)
    assert made.scale is not None
    tensors = (made.y_backprop, made.x, made.scale, made.reserve_space_1, made.reserve_space_2)
    times: list[list[float]] = [[] for _ in _WAYS]
    for _ in range(turns):
        for way, found in zip(_WAYS, times, strict=True):
            with _by(way, nbytes):
                for call in range(_CALLS):
                    start = time.perf_counter()
                    client.fused_batch_norm_grad_v2(*tensors)
                    if call:
                        found.append(time.perf_counter() - start)
    return list(map(statistics.median, times))


@contextmanager
def _by(way: str, nbytes: int) -> Iterator[None]:
    """Sends every call, with tensors of a size, one way."""
    kind, _, network = way.partition(", ")
    below_nbytes = nbytes + 1 if kind == "one message" else 0

    def run(
        self: TransportSelector, request: PreparedRequest[Result], deadline: Deadline, cancellation: Cancellation
    ) -> Result:
        endpoints = self._discovery.endpoints(self._ask_endpoints, deadline, cancellation)
        if way == "shared":
            return self._share(request, endpoints, deadline, cancellation)
        transport = {"Unix": endpoints.unix, "TCP": endpoints.tcp, "grpcio": self._grpcio}[network]
        assert isinstance(transport, Http2Transport | GrpcioTransport), f"the server has no {network}"
        return self._send(request, transport, deadline, cancellation)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(TransportSelector, "run", run))
        for transport in (Http2Transport, GrpcioTransport):
            stack.enter_context(mock.patch.object(transport, "unary_below_nbytes", below_nbytes))
        yield


if __name__ == "__main__":
    main()
