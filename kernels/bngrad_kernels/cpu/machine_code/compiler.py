"""Compiles one kernel: ``python -m bngrad_kernels.cpu.machine_code.compiler KERNEL FILE``.

The processor to compile for is named by ``NUMBA_CPU_NAME`` and ``NUMBA_CPU_FEATURES``, as Numba reads them. Code that
cannot be written to the file, as on a full disk, goes to the standard output, and the reason to stderr.
"""

from __future__ import annotations

import gc
import os
import struct
import sys
from pathlib import Path
from typing import Any

from bngrad_kernels import compiled_code
from bngrad_kernels.cpu.machine_code.float16 import CONVERSIONS
from bngrad_kernels.cpu.machine_code.kernels import ALONE, HELP, JOIN

_C_FUNCTIONS = {"fma", "fmaf", "memcpy", "memset", "sqrt"}
"""What kernels may call."""


def main() -> None:
    """Compiles the kernel that the arguments name."""
    name, file = sys.argv[1:]
    gc.disable()  # the process ends soon
    # Numba would import it, for what no kernel here uses.
    sys.modules["scipy"] = None  # type: ignore[assignment]
    code = _object_code(name)
    try:
        compiled_code.write(Path(file), code)
    except OSError as error:
        print(error, file=sys.stderr)
        sys.stdout.buffer.write(compiled_code.sealed(code))


def _object_code(name: str) -> bytes:
    import llvmlite.binding as llvm  # noqa: PLC0415 - after scipy is hidden from Numba

    dtype, _, order = name.partition("-")
    module = _linked(_translated(dtype, int(order)))
    if dtype == "float16":
        module.link_in(llvm.parse_assembly(CONVERSIONS))
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=os.environ["NUMBA_CPU_NAME"], features=os.environ["NUMBA_CPU_FEATURES"], opt=3, reloc="static",
        codemodel="jitdefault", jit=True,
    )  # fmt: skip
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(module, passes)
    code = bytes(machine.emit_object(module))
    if unknown := _needed(code) - _C_FUNCTIONS:
        raise RuntimeError(f"the kernel calls functions that are not there: {sorted(unknown)}")
    return code


def _translated(dtype: str, order: int) -> dict[str, tuple[list[str], str]]:
    """Returns for each function of a kernel the texts in LLVM's language, and its name in them."""
    from numba import int64  # noqa: PLC0415

    from bngrad_kernels.cpu.driver import KERNELS  # noqa: PLC0415
    from bngrad_kernels.cpu.machine_code.float_mode import begin_default, end_default  # noqa: PLC0415
    from bngrad_kernels.cpu.machine_code.linked import translate  # noqa: PLC0415
    from bngrad_kernels.cpu.simd import TAGS  # noqa: PLC0415
    from bngrad_kernels.cpu.team import call_at, help_with_calls  # noqa: PLC0415

    tag = next(tag for known, tag in TAGS.items() if known.name == dtype)
    entries = KERNELS[order]

    def alone(call: Any) -> None:
        before = begin_default()
        entries.alone(tag, call_at(call))
        end_default(before)

    def join(call: Any, member: Any, kernel: Any) -> None:
        before = begin_default()
        entries.join(tag, call_at(call), member, kernel)
        end_default(before)

    def help_forever(call: Any, member: Any) -> None:
        help_with_calls(call_at(call), call, member)

    return {
        ALONE: translate(alone, int64),
        JOIN: translate(join, int64, int64, int64),
        HELP: translate(help_forever, int64, int64),
    }


def _linked(translated: dict[str, tuple[list[str], str]]) -> Any:
    """Makes one module of functions, which keep the names they are known by; all that they call becomes internal."""
    import llvmlite.binding as llvm  # noqa: PLC0415

    texts = dict.fromkeys(text for texts, _ in translated.values() for text in texts)
    module, *others = map(llvm.parse_assembly, texts)
    for other in others:
        module.link_in(other)
    names = {entry: symbol for symbol, (_, entry) in translated.items()}
    for value in (*module.functions, *module.global_variables):
        if value.name in names:
            value.name = names[value.name]
        elif not value.is_declaration:
            value.linkage = "internal"  # what no one calls from outside need not be kept
    return module


def _needed(code: bytes) -> set[str]:
    """The symbols that an ELF object file expects elsewhere: those that no section of it has."""
    import llvmlite.binding as llvm  # noqa: PLC0415

    sections = {section.name(): section.data() for section in llvm.ObjectFileRef.from_data(code).sections()}
    names, symbols = sections[b".strtab"], struct.iter_unpack("<IBBHQQ", sections[b".symtab"])
    starts = [name for name, _, _, section, _, _ in symbols if name and not section]
    return {names[start : names.index(b"\0", start)].decode() for start in starts}


if __name__ == "__main__":
    main()
