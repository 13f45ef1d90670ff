"""The processor's name, the limits of a container, and the caches."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from bngrad_kernels import machine

CORES = len(os.sched_getaffinity(0))
MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        ("model name\t: AMD EPYC\ncpu family\t: 25\nmodel\t\t: 17", "AMD EPYC (family 25, model 17)"),
        ("CPU implementer\t: 0x41\nCPU part\t: 0xd0c", "aarch64 (implementer 0x41, part 0xd0c)"),
        ("model name\t: ARMv8\nCPU implementer\t: 0x41\nCPU part\t: 0xd08", "ARMv8 (implementer 0x41, part 0xd08)"),
        (None, "aarch64"),
    ],
    ids=["x86", "Arm", "Arm with a name", "no /proc"],
)
def test_a_processor_is_described_as_far_as_linux_knows_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, facts: str | None, name: str
) -> None:
    if facts is not None:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{facts}\n\nprocessor\t: 1\n{facts}\n")
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert machine.processor() == name


@pytest.mark.parametrize(
    ("facts", "model"),
    [
        ("vendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 85\nmodel name\t: Xeon", ("GenuineIntel", 6, 85)),
        ("CPU implementer\t: 0x41\nCPU part\t: 0xd0c", ("", 0, 0)),
        ("cpu\t: POWER9\nmodel\t: 9009-42A", ("", 0, 0)),
        (None, ("", 0, 0)),
    ],
    ids=["x86", "Arm", "POWER", "no /proc"],
)
def test_the_model_is_that_of_the_first_processor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, facts: str | None, model: tuple[str, int, int]
) -> None:
    if facts is not None:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{facts}\n\nprocessor\t: 1\nmodel\t: 1\n")
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    assert machine.model() == model


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
    make_tree(monkeypatch, tmp_path, files, "0::/\n")
    assert (machine.cores(), machine.memory_bytes()) == (cores, memory)


@pytest.mark.parametrize(
    ("limit", "threads"), [("1", 1), (" 1,4", 1), ("100000", CORES), ("0", CORES), ("", CORES), ("all", CORES)]
)
def test_omp_num_threads_limits_threads(monkeypatch: pytest.MonkeyPatch, limit: str, threads: int) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", limit)
    assert machine.threads() == threads


GROUPS_OF_VERSION_1 = "12:memory:/system.slice/b.service\n3:cpu,cpuacct:/system.slice\n1:name=systemd:/\n0::/\n"


@pytest.mark.parametrize(
    ("files", "groups"),
    [
        pytest.param(
            {"system.slice/b.service/cpu.max": "100000 100000", "system.slice/b.service/memory.max": "1048576"},
            "0::/system.slice/b.service\n",
            id="its own",
        ),
        pytest.param(
            {
                "system.slice/cpu.max": "100000 100000",
                "system.slice/memory.max": "1048576",
                "system.slice/b.service/cpu.max": "max 100000",
                "system.slice/b.service/memory.max": "2097152",
            },
            "0::/system.slice/b.service\n",
            id="those of the slice",
        ),
        pytest.param(
            {"cpu.max": "100000 100000", "memory.max": "1048576"},
            "0::/docker/0123\n",
            id="a container that sees its name outside",
        ),
        pytest.param(
            {
                "cpu/system.slice/cpu.cfs_quota_us": "100000",
                "cpu/system.slice/cpu.cfs_period_us": "100000",
                "memory/system.slice/memory.limit_in_bytes": "1048576",
                "memory/system.slice/b.service/memory.limit_in_bytes": str(1 << 60),
            },
            GROUPS_OF_VERSION_1,
            id="version 1",
        ),
        pytest.param({"cpu.max": "100000 100000", "memory.max": "1048576"}, None, id="no /proc"),
    ],
)
def test_the_limits_of_the_group_of_this_process_and_of_all_that_hold_it_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, str], groups: str | None
) -> None:
    files = {**files, "other.slice/cpu.max": "1000 100000", "other.slice/memory.max": "1"}
    make_tree(monkeypatch, tmp_path, files, groups)
    assert (machine.cores(), machine.memory_bytes()) == (1, 1 << 20)


@pytest.mark.parametrize(
    ("sizes", "nbytes"), [({}, 0), ({"0": "48K", "2": "1024K", "3": "32768K"}, 32 << 20), ({"0": "?"}, 0)], ids=str
)
def test_the_largest_cache_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sizes: dict[str, str], nbytes: int
) -> None:
    for index, size in sizes.items():
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}/size").write_text(f"{size}\n")
    monkeypatch.setattr(machine, "CACHES", tmp_path)
    assert machine.cache_nbytes() == nbytes


def make_tree(monkeypatch: pytest.MonkeyPatch, folder: Path, files: dict[str, str], groups: str | None) -> None:
    """Makes the files of groups, and that which says in which of them this process is."""
    for name, text in files.items():
        file = folder / "root" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    if groups is not None:
        (folder / "groups").write_text(groups)
    monkeypatch.setattr(machine, "ROOT", folder / "root")
    monkeypatch.setattr(machine, "GROUPS", folder / "groups")
