"""``bngrad warm``: compiles the CPU kernels before a server needs them."""

from __future__ import annotations

import os
import sys
import time

import click

from bngrad_kernels.cpu.machine_code import cache
from bngrad_kernels.cpu.machine_code.kernels import LEVELS, host
from bngrad_kernels.cpu.machine_code.warm import fill, missing


@click.command()
@click.option(
    "--cpu", "levels", multiple=True, type=click.Choice(LEVELS),
    help="Level of processors; may be given several times. Default: that of this processor.",
)  # fmt: skip
@click.option(
    "--jobs", type=click.IntRange(min=1), default=len(os.sched_getaffinity(0)), metavar="INTEGER",
    help="How many kernels to compile at once. Default: one per core.",
)  # fmt: skip
def warm(levels: tuple[str, ...], jobs: int) -> None:
    """Compiles the CPU kernels before a server needs them.

    They are kept under $XDG_CACHE_HOME/bngrad, or ~/.cache/bngrad. A server uses the kernels of its own processor's
    level; an image that has those of x86-64-v3 and x86-64-v4 starts fast on any x86 processor with AVX2, and one that
    has those of generic and neoverse-n1 on any 64-bit Arm processor.
    """
    failures = []
    for cpu in levels or [host()]:
        begin = time.monotonic()
        for kernel, failure in fill(cpu, missing(cpu), jobs):
            print(f"{cpu} {kernel}: {failure or f'compiled after {time.monotonic() - begin:.1f} s'}", flush=True)
            failures += [failure] if failure else []
        if not missing(cpu):
            places = [folder / cpu for folder in (cache.folder(), cache.shipped()) if any((folder / cpu).glob("*.o"))]
            print(f"{cpu}: all kernels are in {' and '.join(map(str, places))}")
    if failures:
        sys.exit(1)
