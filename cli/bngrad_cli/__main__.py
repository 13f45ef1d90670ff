"""The entry point of ``bngrad`` and ``python -m bngrad_cli``."""

from __future__ import annotations

import io
import sys

from bngrad_cli.main import main as main_command

_MODULES = {
    "cli": ("rich",),
    "server": (
        "grpc_channelz", "grpc_health", "grpc_reflection", "grpc_status", "h11", "llvmlite", "numba",
        "prometheus_client", "pydantic", "pydantic_settings",
    ),
}  # fmt: skip
"""The modules that a command may lack, by the extra that installs them."""


def main() -> None:
    """Runs the command line, or names the extra to install for it."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an encoding such as Latin-1 lacks marks and bars
    try:
        main_command(prog_name="bngrad")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        extra = next((extra for extra, modules in _MODULES.items() if missing in modules), None)
        if extra is None:
            raise
        install = f"pip install 'bngrad[{extra}]', or in a checkout pip install '.[{extra}]'"
        sys.exit(f"bngrad: this command needs the module {missing}: {install}")


if __name__ == "__main__":
    main()
