"""The protocol by which a server leases shared memory to clients on its host.

The server makes a directory with two Unix sockets. `CALLS` takes the same calls as every endpoint. `REGIONS` leases
regions of memory: a client connects and sends `pack_request`. The server answers with the region's key, `KEY_NBYTES`
long, and the descriptor of its file; or with a sentence that says why not. The lease ends with the connection.
Meanwhile the client may ask `IS_IN_USE`: whether any request still names the region. The server answers `IN_USE` or
`NOT_IN_USE`. A request that timed out may still write its results.
"""

from __future__ import annotations

import struct

CALLS = "calls"
"""The name of the socket for calls in the server's directory."""
REGIONS = "regions"
"""The name of the socket that leases regions."""
KEY_NBYTES = 16
ALIGNMENT = 64
"""Tensors in a region begin at multiples of this, in bytes."""
IS_IN_USE = b"?"
IN_USE = b"\x01"
NOT_IN_USE = b"\x00"

_SIZE = struct.Struct("<Q")
_MAX_SIZE = 2**64 - 1
_MAX_AUTHORIZATION_NBYTES = 4096
MAX_REQUEST_NBYTES = _SIZE.size + _MAX_AUTHORIZATION_NBYTES


def pack_request(nbytes: int, authorization: str) -> bytes:
    """Packs the request for a region.

    Args:
        nbytes: The size of the region; sizes of 2**64 and more are sent as 2**64 - 1.
        authorization: The value of the ``authorization`` header of calls; empty for none.
    """
    return _SIZE.pack(min(nbytes, _MAX_SIZE)) + authorization.encode()


def unpack_request(message: bytes) -> tuple[int, str]:
    """Returns size and authorization of a request for a region; the size of a malformed one is 0."""
    (nbytes,) = _SIZE.unpack_from(message) if len(message) >= _SIZE.size else (0,)
    return nbytes, message[_SIZE.size :].decode(errors="replace")
