"""The levels of processors that kernels are compiled for."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import pytest
from tests.servers import BNGRAD

from bngrad_kernels import machine
from bngrad_kernels.cpu.machine_code import kernels

V8_2 = "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp ssbs"


@pytest.mark.parametrize(
    ("features", "level"),
    [
        pytest.param(V8_2, "neoverse-n1", id="Neoverse N1"),
        pytest.param(f"{V8_2} sve asimdfhm dit uscat ilrcpc flagm svei8mm bf16", "neoverse-n1", id="Neoverse V1"),
        pytest.param("fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics cpuid asimdrdm", "generic", id="ThunderX2"),
        pytest.param(
            "fp asimd evtstrm sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm fcma dcpop sve", "generic", id="A64FX"
        ),
        pytest.param("fp asimd evtstrm crc32 cpuid", "generic", id="Cortex-A72"),
        pytest.param(None, "generic", id="no /proc"),
    ],
)
def test_an_arm_processor_has_the_best_level_of_which_it_has_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, features: str | None, level: str
) -> None:
    if features is not None:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nFeatures\t: {features}\nCPU part\t: 0xd0c\n")
    monkeypatch.delenv("NUMBA_CPU_NAME", raising=False)
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(kernels, "LEVELS", kernels.LEVELS_OF["aarch64"])
    assert kernels.host() == level


def test_this_processor_has_a_level() -> None:
    assert kernels.host() in kernels.LEVELS or "NUMBA_CPU_NAME" in os.environ


def test_kernels_are_not_compiled_for_a_level_of_another_architecture() -> None:
    (other,) = kernels.LEVELS_OF.keys() - {platform.machine()}
    level = next(iter(kernels.LEVELS_OF[other]))
    ended = subprocess.run([*BNGRAD, "warm", "--cpu", level], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert f"'{level}' is not one of {', '.join(map(repr, kernels.LEVELS))}" in ended.stderr
