"""Measures what a client makes of two servers of which one is slowed to a third, against a pair of equal ones.

By default requests take a given time on each server's device, without a processor, as on a GPU; with ``--slow quota``
kernels run on cores of which control groups give each server a part. Callers make one call after the other; there are
as many for each call per second that the servers can answer. Goodput is compared with the sum of what each server does
alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from benchmarks.balancing.load import SHAPES, Load, run
from benchmarks.balancing.servers import limited_servers, servers

_POLICIES = {"by speed": True, "by calls in flight alone": False}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_balancing", description=__doc__)
    parser.add_argument("--slow", choices=["device", "quota"], default="device")
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--device-ms", type=float, default=6.0, help="what a request takes on the fast server's device")
    parser.add_argument("--quota", type=float, default=0.6, help="the part of a core that the fast server may use")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each load")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4], help="client processes")
    parser.add_argument("--callers", type=int, default=24, help="of all clients, for equal servers")
    options = parser.parse_args()

    def fleet(*slowness: int) -> AbstractContextManager[Sequence[str]]:
        if options.slow == "device":
            return servers([options.device_ms * each for each in slowness])
        return limited_servers([options.quota / each for each in slowness])

    load = Load(SHAPES[options.shape], options.seconds, 1, options.callers)
    with fleet(1, 1) as pair:
        alone = [run([target], load).goodput for target in pair]
        equal = sum(alone)
        print(f"equal servers: {alone[0]:.0f} and {alone[1]:.0f} calls/s alone")
        balanced = {each: _measure(pair, load, each, equal) for each in options.clients}
    with fleet(1, 3) as pair:
        alone = [run([target], load).goodput for target in pair]
        print(f"one slowed to a third: {alone[0]:.0f} and {alone[1]:.0f} calls/s alone")
        callers = round(options.callers * sum(alone) / equal)
        for name, by_speed in _POLICIES.items():
            for clients in options.clients:
                print(f"{name}, ", end="")
                p99 = _measure(pair, replace(load, callers=callers, by_speed=by_speed), clients, sum(alone))
                print(f"    p99 is {p99 / balanced[clients]:.2f} of that of equal servers")


def _measure(pair: Sequence[str], load: Load, clients: int, total: float) -> float:
    """Prints goodput and latency; returns the 99th percentile in milliseconds."""
    outcome = run(pair, replace(load, clients=clients, callers=max(load.callers // clients, 1)))
    print(
        f"{load.callers} callers in {clients} clients: {outcome.goodput:.0f} calls/s, {outcome.goodput / total:.3f} of "
        f"the sum; p50 {outcome.quantile(0.5):.1f} ms, p99 {outcome.quantile(0.99):.1f} ms",
        flush=True,
    )
    return outcome.quantile(0.99)


if __name__ == "__main__":
    main()
