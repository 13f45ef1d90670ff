"""The limits of a container."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bngrad_server.runtime import cgroup

CORES = len(os.sched_getaffinity(0))
MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("files", "cores", "memory"),
    [
        pytest.param({}, CORES, MEMORY, id="no container"),
        pytest.param({"cpu.max": "max 100000", "memory.max": "max"}, CORES, MEMORY, id="no limits"),
        pytest.param({"cpu.max": "100000 100000", "memory.max": "1048576"}, 1, 1 << 20, id="version 2"),
        pytest.param({"cpu.max": "20000 100000"}, 1, MEMORY, id="a part of a core"),
        pytest.param({"cpu.max": "990000000 100000", "memory.max": str(1 << 60)}, CORES, MEMORY, id="large limits"),
        pytest.param(
            {
                "cpu/cpu.cfs_quota_us": "50000",
                "cpu/cpu.cfs_period_us": "100000",
                "memory/memory.limit_in_bytes": "1048576",
            },
            1,
            1 << 20,
            id="version 1",
        ),
        pytest.param(
            {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, CORES, MEMORY, id="version 1, no limit"
        ),
    ],
)
def test_a_containers_limits_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, str], cores: int, memory: int
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(cgroup, "ROOT", tmp_path)
    assert (cgroup.cores(), cgroup.memory_bytes()) == (cores, memory)
