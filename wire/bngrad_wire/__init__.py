"""How tensors travel: what both ends of a connection share."""

__version__ = "0.1.0"
