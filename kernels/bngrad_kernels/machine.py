"""This machine, and what the limits of a container or service leave of it, by cgroup version 2 or 1."""

from __future__ import annotations

import math
import os
import platform
import resource
from pathlib import Path, PurePosixPath

ROOT = Path("/sys/fs/cgroup")
GROUPS = Path("/proc/self/cgroup")
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
CPUINFO = Path("/proc/cpuinfo")
_NUMBERS = {"cpu family": "family", "model": "model", "CPU implementer": "implementer", "CPU part": "part"}
"""What Linux calls the numbers that a processor of x86, or of Arm, has beside its name."""


def processor() -> str:
    """Returns the processor's name, with its numbers, since virtual machines often hide the rest."""
    facts = _facts(CPUINFO)
    name = facts.get("model name") or platform.processor() or platform.machine()
    numbers = [f"{word} {facts[fact]}" for fact, word in _NUMBERS.items() if fact in facts]
    return f"{name} ({', '.join(numbers)})" if numbers else name


def model() -> tuple[str, int, int]:
    """Returns an x86 processor's vendor, family and model, such as ("GenuineIntel", 6, 85); ("", 0, 0) for others."""
    facts = _facts(CPUINFO)
    if "vendor_id" not in facts:
        return "", 0, 0
    return facts["vendor_id"], int(facts.get("cpu family", 0)), int(facts.get("model", 0))


def features() -> set[str]:
    """Returns what Linux says an Arm processor has, in its words, such as atomics; an empty set for others."""
    return set(_facts(CPUINFO).get("Features", "").split())


def cache_nbytes() -> int:
    """Returns the bytes of the largest cache, which cores share; 0 if Linux does not say."""
    sizes = [_text(file).strip() for file in CACHES.glob("index*/size")]
    return max((int(size[:-1]) << 10 for size in sizes if size.endswith("K")), default=0)


def memory_bytes() -> int:
    """Returns the bytes of memory that this process may use."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for file in (*_files("", "memory.max"), *_files("memory", "memory.limit_in_bytes")):
        limits += _numbers(file)[:1]
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    return min(limits) if address_space == resource.RLIM_INFINITY else min(*limits, address_space)


def cores() -> int:
    """Returns the number of cores that this process may use, rounded up."""
    shares = [float(len(os.sched_getaffinity(0)))]
    times = [_numbers(file) for file in _files("", "cpu.max")]
    times += [
        _numbers(file) + _numbers(file.with_name("cpu.cfs_period_us")) for file in _files("cpu", "cpu.cfs_quota_us")
    ]
    shares += [each[0] / each[1] for each in times if len(each) == 2 and each[0] > 0]
    return math.ceil(min(shares))


def threads() -> int:
    """Returns how many threads should compute: one per core, or fewer if ``OMP_NUM_THREADS`` says so."""
    limit = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return min(cores(), int(limit)) if limit.isdecimal() and int(limit) else cores()


def _files(controller: str, name: str) -> list[Path]:
    """Returns where a file may be: in this process's group, and in all that hold it; "" stands for version 2."""
    group = PurePosixPath("/")
    for line in _text(GROUPS).splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            group = PurePosixPath(path)
    return [ROOT / controller / each.relative_to("/") / name for each in (group, *group.parents)]


def _numbers(file: Path) -> list[int]:
    """Returns the numbers in a file; none for a missing file, or for the word "max"."""
    return [int(word) for word in _text(file).split() if word.lstrip("-").isdigit()]


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def _facts(cpuinfo: Path) -> dict[str, str]:
    """Returns what Linux knows of the first processor."""
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    pairs = (line.partition(":")[::2] for line in text.split("\n\n", 1)[0].splitlines())
    return {key.strip(): value.strip() for key, value in pairs}
