"""The entry point of ``bngrad`` and ``python -m bngrad_cli``."""

from __future__ import annotations

import sys

_MODULES = {
    "cli": ("click", "rich"),
    "server": (
        "grpc_channelz", "grpc_health", "grpc_reflection", "grpc_status", "h11", "numba", "prometheus_client",
        "pydantic", "pydantic_settings",
    ),
}  # fmt: skip
"""The modules that a command may lack, by the extra that installs them."""


def main() -> None:
    """Runs the command line, or names the extra to install for it."""
    try:
        from bngrad_cli import main as command_line  # noqa: PLC0415 - it needs the cli extra

        command_line.main(prog_name="bngrad")
    except ModuleNotFoundError as error:
        extra = next((extra for extra, modules in _MODULES.items() if error.name in modules), None)
        if extra is None:
            raise
        sys.exit(f"bngrad: this command needs the module {error.name}: pip install 'bngrad[{extra}]'")


if __name__ == "__main__":
    main()
