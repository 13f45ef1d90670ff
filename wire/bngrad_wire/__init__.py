"""The wire formats and transports that client and server share."""

__version__ = "0.1.0"
