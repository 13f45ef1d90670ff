"""What may be wrong with a device, as opposed to a request."""

from __future__ import annotations


class DeviceUnavailableError(RuntimeError):
    """A device that is not there, or cannot be used as things are; the message is one sentence that says why."""


class DeviceFailedError(RuntimeError):
    """A device that this process cannot use any more: it has to end. What it held may be computed by another."""
