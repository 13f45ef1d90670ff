"""Compiles one kernel: ``python -m bngrad_kernels.cpu.machine_code.compiler KERNEL FILE``.

The processor to compile for is named by ``NUMBA_CPU_NAME`` and ``NUMBA_CPU_FEATURES``, as Numba reads them.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

SYMBOL = "kernel"
"""The kernel's name in its object file: a C function that takes the address of a `bngrad_kernels.cpu.plan.CALL`."""
_C_FUNCTIONS = {"memcpy", "memset", "sqrt"}
"""What kernels may call."""


def main() -> None:
    """Compiles the kernel that the arguments name."""
    name, file = sys.argv[1:]
    gc.disable()  # the process ends soon
    # Numba would import it, for what no kernel here uses.
    sys.modules["scipy"] = None  # type: ignore[assignment]
    code = _object_code(name)
    with tempfile.NamedTemporaryFile(dir=Path(file).parent, delete=False) as draft:
        draft.write(code)
    Path(draft.name).replace(file)


def _object_code(name: str) -> bytes:
    import llvmlite.binding as llvm  # noqa: PLC0415 - after scipy is hidden from Numba
    from numba import int64  # noqa: PLC0415

    from bngrad_kernels.cpu.driver import KERNELS  # noqa: PLC0415
    from bngrad_kernels.cpu.machine_code.linked import translate  # noqa: PLC0415
    from bngrad_kernels.cpu.simd import TAGS  # noqa: PLC0415
    from bngrad_kernels.cpu.team import call_at  # noqa: PLC0415

    dtype, _, order = name.partition("-")
    tag = next(tag for known, tag in TAGS.items() if known.name == dtype)
    run = KERNELS[int(order)]

    def kernel(call: Any) -> None:
        run(tag, call_at(call))

    texts, entry = translate(kernel, int64)
    module, *others = map(llvm.parse_assembly, texts)
    for other in others:
        module.link_in(other)
    for code in (*module.functions, *module.global_variables):
        if code.name != entry and not code.is_declaration:
            code.linkage = "internal"  # what no one calls from outside need not be kept
    module.get_function(entry).name = SYMBOL
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=os.environ["NUMBA_CPU_NAME"], features=os.environ["NUMBA_CPU_FEATURES"], opt=3, reloc="static",
        codemodel="jitdefault", jit=True,
    )  # fmt: skip
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(module, passes)
    needed = {code.name for code in module.functions if code.is_declaration and not code.name.startswith("llvm.")}
    if needed - _C_FUNCTIONS:
        raise RuntimeError(f"the kernel may raise an error, for which it would need Python: {sorted(needed)}")
    return machine.emit_object(module)


if __name__ == "__main__":
    main()
