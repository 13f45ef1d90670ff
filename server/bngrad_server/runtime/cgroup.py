"""The memory and cores that the limits of a container leave, by cgroup version 2 or 1."""

from __future__ import annotations

import math
import os
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


def memory_bytes() -> int:
    """Returns the bytes of memory that this process may use."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        limits += _numbers(name)[:1]
    return min(limits)


def cores() -> int:
    """Returns the number of cores that this process may use, rounded up."""
    shares = [float(len(os.sched_getaffinity(0)))]
    for times in (_numbers("cpu.max"), _numbers("cpu/cpu.cfs_quota_us") + _numbers("cpu/cpu.cfs_period_us")):
        if len(times) == 2 and times[0] > 0:
            quota, period = times
            shares.append(quota / period)
    return math.ceil(min(shares))


def _numbers(name: str) -> list[int]:
    """Returns the numbers in a file; none for a missing file, or for the word "max"."""
    try:
        words = (ROOT / name).read_text().split()
    except OSError:
        return []
    return [int(word) for word in words if word.lstrip("-").isdigit()]
