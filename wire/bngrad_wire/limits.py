"""What both ends have to agree on, beside the messages."""

from __future__ import annotations

MAX_PROTOBUF_NBYTES = 2**31 - 1
"""The largest message that protobuf can hold, in bytes."""
MAX_PRIORITY = 8
"""Priorities are from its negative to this."""
REGION_NBYTES = 64 * 2**20
"""The least memory that the SDK has a server on its host share, in bytes; a larger array takes a region for itself."""
