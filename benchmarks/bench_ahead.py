"""Time of a gradient whose x was sent ahead, against one whose x comes with the call.

Contestants take turns, and every answer is checked bit for bit. What is sent ahead is there when the clock starts, also
on the GPU if the server has one.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import statistics
import time
from contextlib import ExitStack

from benchmarks.transport import inputs
from benchmarks.warm_server import WarmServer

import bngrad
from bngrad.typing import Transport

_CONTESTANTS: dict[str, tuple[Transport, bool]] = {
    "TCP": ("stream", False),
    "shared, ordinary arrays": ("shared", False),
    "shared, arrays there": ("shared", True),
}
"""The transport, and whether the arrays lie in the shared memory."""
_THERE_S = 0.1
"""After this, a tensor is there."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_ahead", description=__doc__)
    parser.add_argument("--sizes", nargs="+", type=inputs.size, default=list(map(inputs.size, ("1MB", "8MB", "25MB"))))
    parser.add_argument("--calls", type=int, default=25)
    parser.add_argument("--device", default="cpu", help="the server's device")
    options = parser.parse_args()
    with ExitStack() as stack:
        server = stack.enter_context(WarmServer(device=options.device))
        transports = {transport for transport, _ in _CONTESTANTS.values()}
        clients = {each: stack.enter_context(bngrad.Client(server.target, transport=each)) for each in transports}
        print(f"{'ms, median':36}{'with the call':>15}{'x ahead':>10}")
        for nbytes, (title, (transport, in_region)) in itertools.product(options.sizes, _CONTESTANTS.items()):
            plain, ahead = _medians(clients[transport], nbytes, options.calls, in_region=in_region)
            print(f"{f'3 x {inputs.label(nbytes)}, {title}':36}{1e3 * plain:15.2f}{1e3 * ahead:10.2f}", flush=True)


def _medians(client: bngrad.Client, nbytes: int, calls: int, *, in_region: bool) -> tuple[float, float]:
    """Returns the seconds of a call without and with a tensor ahead."""
    problem = inputs.problem(nbytes)
    assert problem.scale is not None
    y_backprop, x, out = problem.y_backprop, problem.x, None
    if in_region:
        y_backprop, x, out = (client.empty(x.shape, x.dtype) for _ in range(3))
        y_backprop[...], x[...] = problem.y_backprop, problem.x
    rest = (problem.scale, problem.reserve_space_1, problem.reserve_space_2)
    times: list[list[float]] = [[], []]
    bits: set[bytes] = set()
    for _ in range(calls):
        for is_ahead in (False, True):
            tensor = client.send_ahead(x) if is_ahead else x
            time.sleep(_THERE_S)
            start = time.perf_counter()
            result = client.fused_batch_norm_grad_v3(y_backprop, tensor, *rest, None, out=out)
            times[is_ahead].append(time.perf_counter() - start)
            bits.add(hashlib.sha256(b"".join(each.tobytes() for each in result)).digest())
            del tensor, result
    if len(bits) > 1:
        raise SystemExit("the bits differ")
    return statistics.median(times[0]), statistics.median(times[1])


if __name__ == "__main__":
    main()
