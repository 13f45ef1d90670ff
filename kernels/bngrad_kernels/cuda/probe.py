"""Finds the usable GPUs, in a separate process, since a broken driver may crash it.

``python -m bngrad_kernels.cuda.probe`` prints a JSON object: ``usable``, the names of the usable GPUs, and ``reasons``,
a sentence for each unusable one, or a single sentence for all.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys

from bngrad_kernels.errors import DeviceUnavailableError

_TIMEOUT = 120  # seconds; the first contact with several GPUs takes a few


@functools.cache
def usable() -> tuple[list[str], list[str]]:
    """Returns the names of the usable GPUs, and why the others are not usable. Runs the probe once and caches it."""
    command = [sys.executable, "-m", "bngrad_kernels.cuda.probe"]
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
    from bngrad_kernels.cuda.device import CupyDevice, count  # noqa: PLC0415 - may crash, so only in this process

    names: list[str] = []
    reasons: list[str] = []
    try:
        for ordinal in range(count()):
            try:
                CupyDevice(ordinal)
                names.append(f"cuda:{ordinal}")
            except DeviceUnavailableError as error:
                reasons.append(f"cuda:{ordinal}: {error}")
    except DeviceUnavailableError as error:
        reasons.append(str(error))
    print(json.dumps({"usable": names, "reasons": reasons}))


if __name__ == "__main__":
    main()
