"""Errors of a device, as opposed to those of a request."""

from __future__ import annotations


class DeviceUnavailableError(RuntimeError):
    """The device is missing or cannot be used; the message is one sentence that says why."""


class KernelNotKeptError(DeviceUnavailableError):
    """A kernel was compiled, and the cache cannot keep it.

    Attributes:
        code: Its code.
    """

    def __init__(self, message: str, code: bytes) -> None:
        super().__init__(message)
        self.code = code


class DeviceFailedError(RuntimeError):
    """This process can no longer use the device and has to end. Another process may compute its requests."""
