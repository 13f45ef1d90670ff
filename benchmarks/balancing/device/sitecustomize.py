"""Makes the workers of a server as slow as a device: each request takes FLEET_DEVICE_MS more, without a processor."""

import os
import sys
import time
from typing import Any

if "bngrad_server.workers.main" in sys.orig_argv and "FLEET_DEVICE_MS" in os.environ:
    from bngrad_kernels.cpu.backend import CpuBackend

    seconds, run = float(os.environ["FLEET_DEVICE_MS"]) / 1e3, CpuBackend.run

    def slow_run(self: CpuBackend, problems: Any) -> None:
        until = time.monotonic() + seconds * len(problems)
        run(self, problems)
        time.sleep(max(until - time.monotonic(), 0.0))

    CpuBackend.run = slow_run  # type: ignore[method-assign]
