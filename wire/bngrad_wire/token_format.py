"""Bearer tokens: how one is made, hashed, and written as a line of the server's token file.

A token has 256 random bits, so its plain hash cannot be undone by guessing.
"""

from __future__ import annotations

import hashlib
import re
import secrets

SCHEME = "Bearer "
"""What precedes a token in the ``authorization`` header."""
_PREFIX = "bngrad_"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_LINE = re.compile(rf"({_NAME.pattern})\s+sha256:([0-9a-f]{{64}})")


def new_token(name: str) -> tuple[str, str]:
    """Makes a token; returns the token, which its owner sends, and the line for the server's file.

    Raises:
        ValueError: The name has characters that the file cannot hold.
    """
    if _NAME.fullmatch(name) is None:
        expected = "1 to 64 letters, digits or . _ @ -, the first a letter or digit"
        raise ValueError(f"a name must be {expected}, not {name!r}")
    token = _PREFIX + secrets.token_urlsafe(32)
    return token, f"{name} sha256:{hash_token(token).hex()}"


def parse_line(line: str) -> tuple[str, bytes] | None:
    """Returns the owner's name and the token's hash in a line of the file; None for a malformed line."""
    match = _LINE.fullmatch(line)
    return None if match is None else (match[1], bytes.fromhex(match[2]))


def is_sendable(token: str) -> bool:
    """Whether a header can have a token: printable ASCII without blanks."""
    return bool(token) and token.isascii() and token.isprintable() and " " not in token


def hash_token(token: str) -> bytes:
    """Returns the hash by which the server knows a token."""
    return hashlib.sha256(token.encode(errors="replace")).digest()
