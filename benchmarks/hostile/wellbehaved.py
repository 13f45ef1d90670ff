"""The well-behaved client: requests small gradients at a slow rate, and prints the latencies.

Run as ``python -m benchmarks.hostile.wellbehaved TARGET TOKEN CA TRANSPORT``; for each line that it reads, a number of
seconds, it calls for that long and prints latencies in seconds, and errors, as JSON.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

import bngrad

_PAUSE_S = 0.002
_SHAPE = (4, 4, 4, 64)


def main() -> None:
    target, token, ca, transport = sys.argv[1:]
    tensor, stats = np.ones(_SHAPE, np.float32), np.ones(_SHAPE[-1], np.float32)
    with bngrad.Client(target, tls=bngrad.Tls(ca), token=token, transport=transport) as client:  # type: ignore[arg-type]
        client.fused_batch_norm_grad_v2(tensor, tensor, stats, stats, stats)
        for line in sys.stdin:
            latencies, errors = [], []
            end = time.perf_counter() + float(line)
            while (begun := time.perf_counter()) < end:
                try:
                    client.fused_batch_norm_grad_v2(tensor, tensor, stats, stats, stats, timeout=10)
                except bngrad.BngradError as error:
                    errors.append(str(error))
                latencies.append(time.perf_counter() - begun)
                time.sleep(_PAUSE_S)
            print(json.dumps({"latencies": latencies, "errors": errors}), flush=True)


if __name__ == "__main__":
    main()
