"""The entry point of ``bngrad`` and ``python -m bngrad_cli``."""

from __future__ import annotations

import sys

_EXTRAS = {
    "click": "cli",
    "rich": "cli",
    "grpc_channelz": "server",
    "grpc_health": "server",
    "grpc_reflection": "server",
    "grpc_status": "server",
    "h11": "server",
    "numba": "server",
    "prometheus_client": "server",
    "pydantic": "server",
    "pydantic_settings": "server",
}
"""The modules that a command may lack, and the extra that installs each."""


def main() -> None:
    """Runs the command line, or names the extra to install for it."""
    try:
        from bngrad_cli import main as command_line  # noqa: PLC0415 - it needs the cli extra

        command_line.main(prog_name="bngrad")
    except ModuleNotFoundError as error:
        if error.name not in _EXTRAS:
            raise
        extra = _EXTRAS[error.name]
        sys.exit(f"bngrad: this command needs the module {error.name}: pip install 'bngrad[{extra}]'")


if __name__ == "__main__":
    main()
