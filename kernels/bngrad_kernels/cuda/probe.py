"""Finds the usable GPUs, in a separate process, since a broken driver may crash it, and a broken GPU hang.

A GPU is usable if it passes its self-test, for which its kernels are compiled; workers then find them in the cache.

``python -m bngrad_kernels.cuda.probe`` prints a JSON object: ``usable``, the names of the usable GPUs, and ``reasons``,
a sentence for each unusable one, or a single sentence for all.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess

from bngrad_kernels.child import module_command
from bngrad_kernels.errors import DeviceFailedError, DeviceUnavailableError

_TIMEOUT = 300  # seconds; compiling takes ten or more, and the first contact with several GPUs a few
_TEST_NBYTES = 4 << 20


@functools.cache
def usable() -> tuple[list[str], list[str]]:
    """Returns the names of the usable GPUs, and why the others are not usable. Runs the probe once and caches it."""
    command = module_command("bngrad_kernels.cuda.probe")
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT)  # noqa: S603
    except subprocess.TimeoutExpired:
        return [], [f"the CUDA driver did not answer within {_TIMEOUT} seconds"]
    if done.returncode != 0:
        last = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        return [], [f"looking for GPUs failed: {last}"]
    found = json.loads(done.stdout)
    return found["usable"], found["reasons"]


def main() -> None:
    """Prints the JSON object that `usable` reads."""
    from bngrad_kernels.cuda import CudaBackend  # noqa: PLC0415 - may crash, so only in this process
    from bngrad_kernels.cuda.device import CupyDevice, count  # noqa: PLC0415

    names: list[str] = []
    reasons: list[str] = []
    try:
        for ordinal in range(count()):
            try:
                backend = CudaBackend(CupyDevice(ordinal), chunk_nbytes=_TEST_NBYTES)
                backend.warm_up()
                backend.self_test()
                names.append(f"cuda:{ordinal}")
            except (DeviceUnavailableError, DeviceFailedError) as error:
                reasons.append(f"cuda:{ordinal}: {error}")
    except DeviceUnavailableError as error:
        reasons.append(str(error))
    print(json.dumps({"usable": names, "reasons": reasons}), flush=True)
    os._exit(0)  # a normal exit would call into a device that may have failed, or wait for it


if __name__ == "__main__":
    main()
