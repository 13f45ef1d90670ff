"""``python -m bngrad_server`` is the command ``bngrad``."""

from bngrad_server.cli import main

if __name__ == "__main__":
    main()
