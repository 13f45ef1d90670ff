"""The command ``bngrad``."""
