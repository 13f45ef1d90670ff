"""Servers in processes of their own, whose speed is given."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bngrad_wire.addresses import ready_address

_DEVICE = Path(__file__).parent / "device"
_CGROUPS = Path("/sys/fs/cgroup/cpu")
_PERIOD_US = 5000
_numbers = itertools.count()


@contextlib.contextmanager
def servers(milliseconds: Sequence[float]) -> Iterator[list[str]]:
    """Runs a server for each speed, given as the time of a request; gives their addresses."""
    with contextlib.ExitStack() as stack:
        path = os.pathsep.join([str(_DEVICE), *sys.path])
        yield [
            stack.enter_context(_serving({"PYTHONPATH": path, "FLEET_DEVICE_MS": str(each)})) for each in milliseconds
        ]


@contextlib.contextmanager
def limited_servers(cores: Sequence[float]) -> Iterator[list[str]]:
    """Runs a server for each part of a core, which its control group (version 1) lets it use; gives their addresses."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(_limited(number, each)) for number, each in enumerate(cores)]


@contextlib.contextmanager
def _limited(core: int, part: float) -> Iterator[str]:
    group = _CGROUPS / f"bngrad-balancing-{os.getpid()}-{next(_numbers)}"
    group.mkdir()
    try:
        (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(int(part * _PERIOD_US)))
        prefix = ("taskset", "-c", str(core), "sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh")
        with _serving({"PYTHONPATH": os.pathsep.join(sys.path)}, prefix) as target:
            yield target
    finally:
        group.rmdir()


@contextlib.contextmanager
def _serving(variables: dict[str, str], prefix: Sequence[str] = ()) -> Iterator[str]:
    options = ("--listen", "127.0.0.1:0", "--device", "cpu", "--workers", "1", "--threads", "1", "--front-bytes", "0")
    command = [*prefix, sys.executable, "-m", "bngrad_cli", "serve", *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, **variables}
    ) as process:
        try:
            assert process.stdout is not None
            address = ready_address(process.stdout.readline())
            if address is None:
                raise RuntimeError("a server did not start")
            yield address
        finally:
            process.terminate()
            process.wait()
