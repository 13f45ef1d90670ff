"""The kernels through NVIDIA's own compiler, which needs no GPU."""

from __future__ import annotations

import functools
import itertools
import os
import re
import struct
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from tests.kernels.cuda.architectures import ALL, ONE, noted, state

from bngrad_kernels import compiled_code
from bngrad_kernels.cuda import compiler
from bngrad_kernels.cuda.descriptors import every_kernel
from bngrad_kernels.cuda.kernel_selection import STATIC_SHARED_NBYTES
from bngrad_kernels.errors import DeviceUnavailableError

# All kernels for an architecture take from 12 s to two minutes of a processor's time, and more on a busy machine.
pytestmark = pytest.mark.timeout(600)

DTYPES = ("float32", "float16", "bfloat16")
ARCHITECTURES, COMPILED = ((ONE,), DTYPES[:1]) if noted() == state() else (ALL, DTYPES)
STREAMED = ("training_vectors", "training_elements", "inference_vectors", "inference_elements")
MAIN = "batch_norm_grad.cu"
MOST_REGISTERS = {"first": 128, "second": 255}  # two blocks of 256 threads on a processor, and one


def kernels(dtypes: Iterable[str]) -> set[str]:
    """The names of the kernels for some element types."""
    return {
        f"{order}_{dtype}_{way}"
        for dtype in dtypes
        for order, ways in (("first", ("training_resident", *STREAMED)), ("second", STREAMED))
        for way in ways
    }


KERNELS = kernels(COMPILED)


def test_every_kernel_is_known_by_its_name() -> None:
    assert {each.symbol for each in every_kernel()} == kernels(DTYPES)


def test_the_kernels_as_they_are_have_compiled_for_every_architecture() -> None:
    """Another compiler than the one noted, such as CUDA 13's, compiles for all of them in these very tests."""
    assert noted() | {"nvrtc": state()["nvrtc"]} == state(), "run `make cuda-architectures`, and commit what it writes"


@functools.cache
def compiled(arch: int) -> compiler.Compiled:
    if arch == 70 and compiler.compiler_version() >= (13, 0):
        pytest.skip("CUDA 13 has left out compute capability 7.0; bngrad[cuda12] brings a compiler that knows it")
    source = (compiler.SOURCES / MAIN).read_text()
    for dtype in set(DTYPES) - set(COMPILED):
        source, found = re.subn(rf"^BNGRAD_KERNELS\({dtype}, \w+\)$", "", source, flags=re.MULTILINE)
        assert found == 1
    return compiler.compile_source(source, MAIN, arch, "--ptxas-options=-v")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_kernel_compiles_and_keeps_everything_in_registers(arch: int) -> None:
    log = compiled(arch).log
    assert set(re.findall(r"Compiling entry function '(\w+)'", log)) == KERNELS
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert len(frames) >= len(KERNELS)
    assert set(frames) == {("0", "0", "0")}
    used = re.findall(r"entry function '(first|second)_\w+'(?:.*\n)+?.*Used (\d+) registers", log)
    assert len(used) == len(KERNELS)
    assert all(int(registers) <= MOST_REGISTERS[order] for order, registers in used)
    assert max(map(int, re.findall(r"(\d+) bytes smem", log))) + (1 << 10) <= STATIC_SHARED_NBYTES
    assert " lmem" not in log


def test_machine_code_holds_all_that_its_header_tells_of() -> None:
    cubin = compiled(ONE).cubin
    programs, sections = struct.unpack_from("<QQ", cubin, 32)  # of the ELF header: where they are described
    program_nbytes, n_programs, section_nbytes, n_sections = struct.unpack_from("<4H", cubin, 54)
    assert cubin.startswith(b"\x7fELF")
    assert max(programs + program_nbytes * n_programs, sections + section_nbytes * n_sections) <= len(cubin)


def sections(cubin: bytes) -> dict[str, bytes]:
    """The contents of an ELF file's sections, by name."""
    (start,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<3H", cubin, 58)
    found = [struct.unpack_from("<I20xQQ", cubin, start + size * number) for number in range(count)]
    strings = found[names][1]
    contents = {}
    for name, offset, nbytes in found:
        first = strings + name
        contents[cubin[first : cubin.index(b"\0", first)].decode()] = cubin[offset : offset + nbytes]
    return contents


def test_every_operation_is_rounded_by_itself_and_none_is_an_approximation() -> None:
    ptx = compiled(ONE).ptx
    assert "div.rn.f64" in ptx
    assert "sqrt.rn.f64" in ptx
    assert not re.findall(r"\S*(?:\.ftz|\.approx|rsqrt)\S*", ptx)
    assert not re.findall(r"\b(?:atom|red)\.\S*\.f(?:16|32|64)\S*", ptx)  # no order of additions is left to chance


def test_what_is_aligned_moves_in_16_bytes() -> None:
    parts = re.split(r"\.entry (\w+)", compiled(ONE).ptx)
    for name, body in zip(parts[1::2], parts[2::2], strict=True):
        tensors = re.findall(r"(?:ld\.global\.(?:nc|cs)|st\.global\.cs)\.(v4\.u32|u32|u16)\b", body)
        assert tensors
        assert ("v4.u32" in tensors) == (not name.endswith("_elements")), name


LOAD, ADD_64 = "LDG.STRONG.GPU", "DADD"


def sums_of_sums(code: bytes) -> Iterator[str]:
    """The loads of 64 or 128 bits past the first-level cache, and the additions of float64, in machine code.

    From sm_70 to sm_120 an instruction has 16 bytes, some bits of which tell the operation, as nvdisasm 13.5 shows.
    """
    for low, high in struct.iter_unpack("<QQ", code):
        if low & 0x1FF == 0x181 and high >> 12 & 0xFF in {0xEF, 0xF4} and high >> 9 & 7 in {5, 6}:
            yield LOAD
        elif low & 0x1FF == 0x29:
            yield ADD_64


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_sections_and_groups_are_added_up_with_several_loads_on_their_way(arch: int) -> None:
    code = sections(compiled(arch).cubin)
    for kernel in KERNELS:
        if "_training_" in kernel:
            runs = itertools.groupby(sums_of_sums(code[f".text.{kernel}"]))
            most = max(len(list(run)) for instruction, run in runs if instruction == LOAD)
            assert most >= 6, kernel


def test_a_mistake_in_the_source_is_told_in_the_compilers_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for source in compiler.SOURCES.glob("*.cu*"):
        (tmp_path / source.name).write_text(source.read_text().replace("__syncthreads()", "__sync()"))
    monkeypatch.setattr(compiler, "SOURCES", tmp_path)
    with pytest.raises(RuntimeError, match="__sync"):
        compiler.compile_kernels(90)


def test_machine_code_is_kept_for_these_very_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = []

    def compile_kernels(arch: int) -> compiler.Compiled:
        made.append(arch)
        return compiler.Compiled(b"code", "", "")

    monkeypatch.setattr(compiler, "compile_kernels", compile_kernels)
    path = compiler.cubin(90)
    assert compiled_code.read(path) == b"code"
    assert tmp_path in path.parents
    assert compiler.cubin(90) == path
    assert compiler.cubin(80) != path
    assert made == [90, 80]
    path.write_bytes(b"co")
    assert compiler.cubin(90) == path
    assert made == [90, 80, 90]
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "batch_norm_grad.cu").write_text("other")
    monkeypatch.setattr(compiler, "SOURCES", sources)
    assert compiler.cubin(90) != path


def test_processes_that_find_the_cache_read_only_share_a_private_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/1")  # where no folder can be made
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(compiler, "compile_kernels", lambda arch: compiler.Compiled(b"code", "", ""))
    path = compiler.cubin(90)
    monkeypatch.setattr(compiler, "compile_kernels", lambda arch: pytest.fail("it is compiled again"))
    assert compiler.cubin(90) == path
    assert path.parent.parent == tmp_path / f"bngrad-{os.getuid()}"


CUDA12 = (50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90, 100, 101, 103, 120, 121)
CUDA13 = tuple(arch for arch in CUDA12 if arch >= 75)


@pytest.mark.parametrize(
    ("capability", "supported", "expected"),
    [
        ((7, 0), CUDA12, 70), ((7, 5), CUDA13, 75), ((8, 0), CUDA13, 80), ((8, 6), CUDA12, 86), ((8, 8), CUDA13, 80),
        ((9, 0), CUDA13, 90), ((10, 0), CUDA13, 100), ((10, 3), (90, 100), 100), ((12, 0), CUDA12, 120),
    ],
)  # fmt: skip
def test_code_is_compiled_for_the_gpu_or_for_one_whose_code_it_runs(
    capability: tuple[int, int], supported: tuple[int, ...], expected: int
) -> None:
    assert compiler.architecture(capability, supported) == expected


@pytest.mark.parametrize(
    ("capability", "supported", "reason"),
    [
        ((6, 1), CUDA12, "compute capability 7.0 or newer is needed, and this GPU has 6.1"),
        ((7, 0), CUDA13, r"does not know compute capability 7.0; CUDA 12 \(the extra cuda12\) still does"),
        ((13, 0), CUDA13, "does not know compute capability 13.0; a newer NVRTC may"),
    ],
)
def test_a_gpu_that_cannot_be_compiled_for_is_refused_in_a_sentence(
    capability: tuple[int, int], supported: tuple[int, ...], reason: str
) -> None:
    with pytest.raises(DeviceUnavailableError, match=reason):
        compiler.architecture(capability, supported)
