"""Runs a module of ours as a child process: ``python child.py MODULE ARGUMENTS...``.

``python -m`` would import modules from the current folder, where other users may have put some.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def module_command(module: str, *arguments: object) -> list[str]:
    """Returns a command that does what ``python -m MODULE ARGUMENTS...`` does, without the current folder."""
    return [sys.executable, __file__, module, *map(str, arguments)]


if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11 has it; without it, the first folder is this file's
        del sys.path[0]
    sys.path.append(str(Path(__file__).resolve().parents[1]))  # our parent may have us from its own sys.path alone
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
