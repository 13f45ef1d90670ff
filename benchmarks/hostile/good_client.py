"""A good client at one door: makes requests at a slow rate, and prints their latencies.

Run as ``python -m benchmarks.hostile.good_client DOOR TARGET TOKEN CA``; CA is empty without TLS. For each line that it
reads, a number of seconds, it calls for that long and prints latencies in seconds, and errors, as JSON.

It uses the door that it is told to and no other one, unlike `bngrad.Client`, which makes a call by another transport
where one fails. "stock" is grpcio's client. Those that speak the SDK's own HTTP/2 make unary calls and exchanges by
turns.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable

import grpc
import numpy as np
from benchmarks.hostile.victim import Victim, channel

import bngrad
from bngrad._credentials import Credentials, Security
from bngrad._deadline import Cancellation, Deadline
from bngrad._requests import codec, ops
from bngrad._requests.attributes import TensorFlowAttributes
from bngrad._requests.request import EXCHANGE_METHOD
from bngrad._transports.connection_pool import NotConnectedError
from bngrad._transports.http2 import Http2Transport

DOORS = ("tcp", "tcp 1 MB", "stock", "unix", "shared")
_TIMEOUT_S = 10.0
_RATE = 50.0
_LARGE_RATE = 12.5
_SHAPE = (4, 4, 1, 64)
_LARGE_SHAPE = (4, 32, 32, 64)


def main() -> None:
    door, target, token, ca = sys.argv[1:]
    call = _call_of(door, target, token, ca or None)
    interval_s = 1 / (_LARGE_RATE if door.endswith("MB") else _RATE)
    call()
    print("ready", flush=True)
    for line in sys.stdin:
        latencies, errors = [], []
        end = time.perf_counter() + float(line)
        while (begun := time.perf_counter()) < end:
            try:
                call()
            except (bngrad.BngradError, NotConnectedError, grpc.RpcError) as error:
                errors.append(f"{type(error).__name__}: {error}")
            latencies.append(time.perf_counter() - begun)
            time.sleep(max(0.001, interval_s - latencies[-1]))
        print(json.dumps({"latencies": latencies, "errors": errors}), flush=True)


def _call_of(door: str, target: str, token: str, ca: str | None) -> Callable[[], object]:
    tls = None if ca is None else bngrad.Tls(ca)
    shape = _LARGE_SHAPE if door.endswith("MB") else _SHAPE
    tensor, stats = np.ones(shape, np.float32), np.ones(shape[-1], np.float32)
    tensors = (tensor, tensor, stats, stats, stats)
    if door == "shared":
        client = bngrad.Client(target, tls=tls or False, token=token or None, transport="shared", insecure=True)
        return lambda: client.fused_batch_norm_grad_v2(*tensors, timeout=_TIMEOUT_S)
    victim = Victim.discover(target, token, ca)
    credentials = Credentials(Security(tls, token or None), target if door != "unix" else "unix:")
    http = Http2Transport(victim.addresses["unix" if door == "unix" else "tcp"], target, credentials)
    request = ops.V2.prepare(tensors, TensorFlowAttributes(1e-4, "NHWC", True, "variance", 0), None)
    if door == "stock":
        call: Callable[..., bytes] = channel(target, ca).unary_unary(request.op.method)
        message, metadata = b"".join(request.pieces()), (("authorization", f"Bearer {token}"),) if token else ()
        return lambda: call(message, timeout=_TIMEOUT_S, metadata=metadata)
    large = [codec.view_of(array) for array in request.large.values()]
    result = codec.view_of(np.empty(shape, np.float32))

    def unary() -> None:
        http.unary(request.op.method, request.pieces(), Deadline.after(_TIMEOUT_S), Cancellation())

    def exchange() -> None:
        limits = Deadline.after(_TIMEOUT_S), Cancellation()
        http.exchange(EXCHANGE_METHOD, request.op.number, request.header_pieces(), large, [result], *limits)

    if door.endswith("MB"):
        return exchange
    ways = itertools.cycle((unary, exchange))

    def by_turns() -> None:
        next(ways)()

    return by_turns


if __name__ == "__main__":
    main()
