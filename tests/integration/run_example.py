"""``python -m tests.integration.run_example NAME ARGUMENTS...`` runs an example once for each JSON list of arguments.

That is in one process, since some examples take seconds to import TensorFlow. It prints a JSON list of what came of the
runs: exit status, standard output, and standard error.
"""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
from unittest import mock


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
    print(json.dumps([run(sys.argv[1], *json.loads(arguments)) for arguments in sys.argv[2:]]))
