"""``python -m tests.integration.run_examples RUNS`` runs examples, once for each list of arguments.

RUNS is a JSON object of such lists by the names of examples. All run in one process, since it takes seconds to import
TensorFlow. It prints an object with what came of the runs: exit status, standard output, and standard error.
"""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
from unittest import mock

with contextlib.suppress(ImportError):  # before TensorFlow, see tests/conftest.py
    import triton  # noqa: F401


def run(name: str, *arguments: str) -> tuple[int, str, str]:
    """Runs an example as ``python -m`` does."""
    output, errors = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
        mock.patch.object(sys, "argv", [name, *arguments]),
    ):
        status = _status_of(name)
    return status, output.getvalue(), errors.getvalue()


def _status_of(name: str) -> int:
    try:
        runpy.run_module(f"examples.{name}", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
            return 1
        return ended.code or 0
    return 0


if __name__ == "__main__":
    runs = json.loads(sys.argv[1])
    print(json.dumps({name: [run(name, *arguments) for arguments in lists] for name, lists in runs.items()}))
