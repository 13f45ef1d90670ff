"""Runs commands in processes that lack the modules of some extras."""

from __future__ import annotations

import subprocess
import sys

SERVER_EXTRA = (
    *(
        "grpc_health",
        "grpc_reflection",
        "h11",
        "llvmlite",
        "numba",
        "prometheus_client",
    ),
    *("pydantic", "pydantic_settings"),
)
_WITHOUT = """
import sys
sys.modules.update(dict.fromkeys({blocked}))  # None makes an import fail
from bngrad_cli.__main__ import main
sys.argv = {arguments}
try:
    main()
finally:
    print(*sorted(name for name, module in sys.modules.items() if module and name.startswith("bngrad_server")))
"""


def run_without(*blocked: str, arguments: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Runs a command in a process that cannot import some modules; its last line lists the server's modules."""
    code = _WITHOUT.format(blocked=blocked, arguments=["bngrad", *arguments])
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
