"""Bearer tokens: who has one may call. The server knows only their hashes.

The file has a line for each token, its owner's name and its hash, as ``bngrad token new`` prints them; empty lines and
what follows a ``#`` say nothing. A token has 256 random bits, so that a plain hash of it cannot be undone by guessing.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from pathlib import Path

from bngrad_server.security.reload import ReloadedFiles

_PREFIX = "bngrad_"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_LINE = re.compile(rf"({_NAME.pattern})\s+sha256:([0-9a-f]{{64}})")
_SCHEME = "bearer "


def new_token(name: str) -> tuple[str, str]:
    """Makes a token: what its owner sends, and the line for the server's file.

    Raises:
        ValueError: The name has characters that the file cannot have.
    """
    if _NAME.fullmatch(name) is None:
        raise ValueError(
            f"a name must be 1 to 64 letters, digits or . _ @ -, the first a letter or digit, not {name!r}"
        )
    token = _PREFIX + secrets.token_urlsafe(32)
    return token, f"{name} sha256:{_hash(token).hex()}"


class Tokens:
    """The tokens of a file."""

    def __init__(self, path: Path) -> None:
        """Reads the file.

        Raises:
            OSError: It cannot be read.
            ValueError: A line of it is malformed; the message says which.
        """
        self._file = ReloadedFiles([path], lambda: _read(path))

    def owner(self, authorization: str | None) -> str | None:
        """Whose token the value of an ``authorization`` header has; None if it has none that is known."""
        if authorization is None or authorization[: len(_SCHEME)].lower() != _SCHEME:
            return None
        presented = _hash(authorization[len(_SCHEME) :].strip())
        found = None
        for name, known in self._file.content:
            if hmac.compare_digest(known, presented):
                found = name
        return found


def _read(path: Path) -> list[tuple[str, bytes]]:
    tokens = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = _LINE.fullmatch(text)
        if match is None:
            raise ValueError(f"line {number} of {path} must be NAME sha256:HASH, as `bngrad token new NAME` prints it")
        tokens.append((match[1], bytes.fromhex(match[2])))
    return tokens


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="replace")).digest()
