"""Runs the command line as a child process that the system kills when its parent dies: ``PARENT_PID ARGUMENTS...``."""

from __future__ import annotations

import sys

from bngrad_cli.__main__ import main
from bngrad_server.runtime.processes import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv.pop(1)))
    main()
