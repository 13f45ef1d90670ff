"""Compiles the kernels with NVRTC and caches the machine code.

CuPy's own compilation would add ``-ftz=true``, which flushes subnormal numbers to zero. The kernels are compiled to
machine code for one architecture, so that the driver needs no compiler of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bngrad_kernels import compiled_code
from bngrad_kernels.errors import DeviceUnavailableError

SOURCES = Path(__file__).parent
_MAIN = "batch_norm_grad.cu"
# Every operation is rounded separately: no contraction, no flushing of subnormals, IEEE division and square root.
_OPTIONS = ("-std=c++17", "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true")


class Compiled(NamedTuple):
    """Machine code, its PTX, and the compiler's log."""

    cubin: bytes
    ptx: str
    log: str


def architecture(capability: tuple[int, int], supported: Sequence[int]) -> int:
    """The architecture to compile for, 90 for sm_90, among those that the compiler supports.

    Raises:
        DeviceUnavailableError: The device is older than 7.0, or the compiler supports no architecture that runs on it.
    """
    major, minor = capability
    if major < 7:
        raise DeviceUnavailableError(f"compute capability 7.0 or newer is needed, and this GPU has {major}.{minor}")
    for candidate in (10 * major + minor, 10 * major):  # code runs on later minor versions
        if candidate in supported:
            return candidate
    cure = "CUDA 12 (the extra cuda12) still does" if major == 7 else "a newer NVRTC may"
    raise DeviceUnavailableError(
        f"the installed CUDA compiler does not know compute capability {major}.{minor}; {cure}"
    )


def compiler_version() -> tuple[int, int]:
    """NVRTC's version.

    Raises:
        DeviceUnavailableError: There is no NVRTC.
    """
    from cupy.cuda import nvrtc  # noqa: PLC0415 - CuPy is optional

    try:
        major, minor = nvrtc.getVersion()
    except Exception as error:  # pathfinder and CuPy raise different errors
        raise DeviceUnavailableError(
            "NVRTC, the CUDA compiler, is not installed: pip install '.[cuda12]' or '.[cuda13]' in a checkout of bngrad"
            " brings it"
        ) from error
    return major, minor


def supported_architectures() -> tuple[int, ...]:
    """The architectures that NVRTC supports."""
    from cupy.cuda import nvrtc  # noqa: PLC0415

    return tuple(nvrtc.getSupportedArchs())


def compile_kernels(arch: int, *options: str) -> Compiled:
    """Compiles all kernels for an architecture, which takes about ten seconds. Needs no GPU.

    Raises:
        RuntimeError: The source does not compile; the message is the compiler's.
    """
    return compile_source((SOURCES / _MAIN).read_text(), _MAIN, arch, *options)


def compile_source(source: str, name: str, arch: int, *options: str) -> Compiled:
    """Compiles a source as `compile_kernels` does.

    Raises:
        RuntimeError: It does not compile; the message is the compiler's.
    """
    from cupy.cuda import nvrtc  # noqa: PLC0415

    program = nvrtc.createProgram(source, name, (), ())
    try:
        try:
            nvrtc.compileProgram(program, (f"-arch=sm_{arch}", f"-I{SOURCES}", *_OPTIONS, *options))
        except nvrtc.NVRTCError as error:
            raise RuntimeError(nvrtc.getProgramLog(program)) from error
        # CuPy drops the last byte, as if it ended a string; the file would be truncated within a header.
        code = nvrtc.getCUBIN(program) + b"\0"
        return Compiled(code, bytes(nvrtc.getPTX(program)).decode(), nvrtc.getProgramLog(program))
    finally:
        nvrtc.destroyProgram(program)


def cubin(arch: int) -> Path:
    """Returns the file with the machine code for an architecture; compiles it if it is not in the cache.

    The digest after the code is no part of it: the headers of the code say where it ends.
    """
    major, minor = compiler_version()
    path = _folder() / f"sm_{arch}-nvrtc-{major}.{minor}.cubin"
    if compiled_code.read(path) is not None:
        return path
    if not compiled_code.is_writable(path.parent):
        folder = compiled_code.private_folder() / path.parent.name
        folder.mkdir(exist_ok=True)
        path = folder / path.name
        if compiled_code.read(path) is not None:
            return path
    compiled_code.write(path, compile_kernels(arch).cubin)
    return path


def fingerprint() -> str:
    """A digest of the sources and options."""
    digest = hashlib.sha256(" ".join(_OPTIONS).encode())
    for source in sorted(SOURCES.glob("*.cu*")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _folder() -> Path:
    """The cache folder of these sources; that of a container image may be read-only."""
    return compiled_code.cache_folder() / f"cuda-{fingerprint()}"
