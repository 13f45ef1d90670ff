"""The command ``bngrad``, also ``python -m bngrad_server``."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line, or says what to install for it."""
    try:
        from bngrad_server import cli  # noqa: PLC0415 - only the server extra has what it imports
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.partition(".")[0].startswith("bngrad"):
            raise
        sys.exit(f"bngrad: no module {error.name}; the server is installed by: pip install 'bngrad[server]'")
    cli.main()


if __name__ == "__main__":
    main()
