"""Loads kernels, compiling those that are not in the cache yet."""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import IO, NamedTuple

import llvmlite.binding as llvm

from bngrad_kernels import compiled_code
from bngrad_kernels.child import module_command
from bngrad_kernels.cpu.machine_code import cache
from bngrad_kernels.cpu.machine_code.kernels import ALONE, HELP, JOIN, Kernel, host
from bngrad_kernels.errors import DeviceUnavailableError, KernelNotKeptError

logger = logging.getLogger(__name__)

LOCK, BACKGROUND_LOCK = ".lock", ".background.lock"
"""The suffixes of the files that are locked while a kernel is compiled: at a usual priority, and at the lowest one.

No process of a usual priority waits for one of the lowest, which may wait for a core for minutes."""


_LOOK_EVERY_S = 1.0


class LoadedKernel(NamedTuple):
    """A kernel in memory, see `bngrad_kernels.cpu.machine_code.kernels.ALONE`.

    Attributes:
        alone_address: Where the code is that computes a call alone.
        alone: Calls it with the address of the call.
        join_address: Where the code is for a member of a team.
        join: Calls it with the address of the call, the number of the member and ``join_address``.
        help: Calls that of a thread that takes part in all calls.
        engine: What keeps the code there.
    """

    alone_address: int
    alone: Callable[[int], None]
    join_address: int
    join: Callable[[int, int, int], None]
    help: Callable[[int, int], None]
    engine: object


def load(kernel: Kernel) -> LoadedKernel:
    """Loads a kernel for this processor.

    Compiles it first if it is not in the cache: one process does that, the others wait for it.

    Raises:
        DeviceUnavailableError: It could not be compiled.
    """
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(reloc="static", codemodel="jitdefault", jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    try:
        code = _code(kernel)
    except OSError as error:
        raise DeviceUnavailableError(f"the kernel {kernel} cannot be compiled or read: {error}") from error
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    alone, join, helps = map(engine.get_function_address, (ALONE, JOIN, HELP))
    return LoadedKernel(
        alone, ctypes.CFUNCTYPE(None, ctypes.c_int64)(alone),
        join, ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(join),
        ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(helps), engine,
    )  # fmt: skip


def is_compiled(kernel: Kernel, cpu: str) -> bool:
    """Whether the cache has a kernel for a level of processors."""
    return compiled(kernel, cpu) is not None


def compiled(kernel: Kernel, cpu: str) -> bytes | None:
    """Returns the code of a kernel from the user's cache, the wheel, or the copy of a cache that cannot be written."""
    for folder in (cache.home(), cache.shipped()):
        if (found := compiled_code.read(folder / cpu / f"{kernel}.o")) is not None:
            return found
    try:
        return compiled_code.read(path(kernel, cpu))
    except OSError:  # there is no folder for kernels, and none can be made
        return None


def path(kernel: Kernel, cpu: str) -> Path:
    """The file of a kernel for a level of processors."""
    folder = cache.folder() / cpu
    folder.mkdir(exist_ok=True)
    return folder / f"{kernel}.o"


def compile_once(kernel: Kernel, cpu: str, lock: str) -> None:
    """Compiles a kernel for a level of processors unless the cache has it.

    Of all processes that ask for it with the same lock, one compiles it, and the others wait.

    Args:
        kernel: The kernel.
        cpu: The level.
        lock: `LOCK` or `BACKGROUND_LOCK`.

    Raises:
        DeviceUnavailableError: It could not be compiled.
        KernelNotKeptError: It was compiled, and the cache cannot keep it.
    """
    with _opened(path(kernel, cpu).with_suffix(lock)) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if is_compiled(kernel, cpu):
            return
        process = _begin(kernel, cpu, file.fileno())
        output, errors = _end(process, kernel, cpu)
        if process.returncode and is_compiled(kernel, cpu):
            return
    lines = errors.decode(errors="replace").strip().splitlines() or [f"exit code {process.returncode}"]
    if process.returncode:
        raise DeviceUnavailableError(f"the kernel {kernel} could not be compiled: {lines[-1]}")
    if output and (code := compiled_code.unsealed(output)) is not None:
        raise KernelNotKeptError(f"the kernel {kernel} could not be kept: {lines[-1]}", code)


def _opened(lock: Path) -> IO[str]:
    try:
        return lock.open("w")  # NFS locks no file that is only read
    except PermissionError:  # another user has made it
        return lock.open()


def _begin(kernel: Kernel, cpu: str, lock_fd: int) -> subprocess.Popen[bytes]:
    """Starts a process that compiles a kernel, whatever the user has set for Numba and for warnings."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA_", "PYTHONWARNINGS"))}
    return subprocess.Popen(  # noqa: S603 - our own module
        module_command("bngrad_kernels.cpu.machine_code.compiler", kernel, path(kernel, cpu)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Numba would add the features of this processor.
        env={**own, "NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": ""},
        pass_fds=(lock_fd,),  # it goes on if this process is killed, and others then wait for it
    )


def _end(process: subprocess.Popen[bytes], kernel: Kernel, cpu: str) -> tuple[bytes, bytes]:
    """Waits for a process that compiles, and ends it if another one, which had the other lock, has been faster."""
    while True:
        try:
            return process.communicate(timeout=_LOOK_EVERY_S)
        except subprocess.TimeoutExpired:
            if is_compiled(kernel, cpu):
                process.kill()


def _code(kernel: Kernel) -> bytes:
    """Returns the code of a kernel for this processor."""
    found = compiled(kernel, host())
    if found is None:
        try:
            compile_once(kernel, host(), LOCK)
        except KernelNotKeptError as error:
            logger.warning("%s; each process compiles it for itself", error)
            return error.code
        found = compiled(kernel, host())
    if found is None:
        raise DeviceUnavailableError(f"the kernel {kernel} was compiled, but {path(kernel, host())} cannot be read")
    return found
