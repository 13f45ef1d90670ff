"""The command ``bngrad``, also ``python -m bngrad_cli``."""

from __future__ import annotations

import sys

_SERVER_EXTRA = {
    "click",
    "grpc_channelz",
    "grpc_health",
    "grpc_reflection",
    "grpc_status",
    "h11",
    "numba",
    "prometheus_client",
    "pydantic",
    "pydantic_settings",
    "rich",
}


def main() -> None:
    """Runs the command line, or says what to install for it."""
    try:
        from bngrad_cli import main as command_line  # noqa: PLC0415 - only the extras have what it imports

        command_line.main(prog_name="bngrad")
    except ModuleNotFoundError as error:
        if error.name not in _SERVER_EXTRA:
            raise
        sys.exit(f"bngrad: no module {error.name}; the server is installed by: pip install 'bngrad[server]'")


if __name__ == "__main__":
    main()
