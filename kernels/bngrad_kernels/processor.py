"""The processor of this machine."""

from __future__ import annotations

import platform
from pathlib import Path


def name() -> str:
    """Returns the processor's name, with the family and model, since virtual machines often hide the rest."""
    facts = _facts(Path("/proc/cpuinfo"))
    if "model name" not in facts:
        return platform.processor() or platform.machine()
    return f"{facts['model name']} (family {facts['cpu family']}, model {facts['model']})"


def _facts(cpuinfo: Path) -> dict[str, str]:
    """Returns what Linux knows of the first processor."""
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    pairs = (line.partition(":")[::2] for line in text.split("\n\n", 1)[0].splitlines())
    return {key.strip(): value.strip() for key, value in pairs}
