"""Functions that are compiled only as parts of the function that calls them.

Numba optimises each function with all that it calls, and makes machine code of it; so it does that to the innermost
functions once for each level of calls. Those decorated with `internal` are translated to LLVM's language, and no more:
the outermost function is optimised with all of them, once. That takes an eighth of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from numba import _dynfunc
from numba.core import cgutils
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import LoweringPass, register_pass
from numba.core.typed_passes import NativeLowering


class _LinkedLibrary(JITCodeLibrary):  # type: ignore[misc]  # numba ships no types.
    """The code of a function as text, and the libraries of what it calls."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.texts: list[str] = []

    def add_ir_module(self, ir_module: Any) -> None:
        self.texts.append(cgutils.normalize_ir_text(str(ir_module)))

    def finalize(self) -> None:
        self._finalized = True


def _texts(outermost: _LinkedLibrary) -> list[str]:
    """The code of a library and of all that it needs, each once."""
    texts: list[str] = []
    found, waiting = {outermost}, [outermost]
    while waiting:
        library = waiting.pop()
        if isinstance(library, _LinkedLibrary):
            texts += library.texts
            needed = [other for other in dict.fromkeys(library._linking_libraries) if other not in found]
            found.update(needed)
            waiting += needed
        else:  # one of Numba's own, which has all that it needs
            texts.append(str(library._get_module_for_linking()))
    return texts


@register_pass(mutates_CFG=True, analysis_only=False)
class _LinkedLowering(LoweringPass):  # type: ignore[misc]
    """As `NativeLowering`, but makes no machine code."""

    _name = "bngrad_linked_lowering"

    def __init__(self) -> None:
        LoweringPass.__init__(self)

    def run_pass(self, state: Any) -> bool:
        state.library = _LinkedLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        state.flags.no_compile = True
        NativeLowering().run_pass(state)
        fndesc, keep_alive = state.cr.fndesc, (state.library,)
        entry = _dynfunc.make_function(fndesc.lookup_module(), fndesc.qualname, "", 0, state.cr.env, keep_alive)
        state.targetctx.insert_user_function(entry, fndesc, keep_alive)
        state.cr = state.cr._replace(cfunc=entry)
        return True


class _LinkedCompiler(CompilerBase):  # type: ignore[misc]
    def define_pipelines(self) -> list[Any]:
        pipeline = DefaultPassBuilder.define_nopython_pipeline(self.state)
        pipeline.passes = [(_LinkedLowering if it is NativeLowering else it, text) for it, text in pipeline.passes]
        pipeline._finalized = False
        pipeline.finalize()
        return [pipeline]


_options = {"error_model": "numpy", "no_cpython_wrapper": True, "pipeline_class": _LinkedCompiler}

internal = numba.njit(no_cfunc_wrapper=True, **_options)
"""Decorates functions that only compiled functions call."""


def translate(function: Callable[..., Any], *arguments: Any) -> tuple[list[str], str]:
    """Translates a function, for arguments of the given Numba types, with all that it calls.

    Returns:
        Modules in LLVM's language, not optimised, and the name of the function that C calls.
    """
    outermost = numba.njit(**_options)(function)
    outermost.compile(arguments)
    compiled = outermost.overloads[arguments]
    return _texts(compiled.library), compiled.fndesc.llvm_cfunc_wrapper_name
