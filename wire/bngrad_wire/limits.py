"""Limits that client and server share."""

from __future__ import annotations

MAX_PROTOBUF_NBYTES = 2**31 - 1
"""The largest message that protobuf can encode, in bytes."""
MAX_RANK = 32
"""More dimensions than any tensor has. To multiply out a shape of thousands of dimensions would take seconds."""
MAX_PRIORITY = 8
"""Priorities are from -MAX_PRIORITY to MAX_PRIORITY."""
LONGEST_S = 7 * 24 * 3600
"""The longest time limit that a user may set, in seconds: timers, sockets and locks refuse those far longer."""
REGION_NBYTES = 64 * 2**20
"""The smallest region that the SDK leases from a server on its host, in bytes; a larger array has its own region."""
