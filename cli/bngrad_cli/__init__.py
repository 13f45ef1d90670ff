"""The command line, ``bngrad``."""
