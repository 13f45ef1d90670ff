"""The token file, which says who may call.

Each line has the name of a token's owner and the token's hash, as ``bngrad token new`` prints it. Empty lines, and
comments from ``#`` on, are ignored.
"""

from __future__ import annotations

import hmac
import logging
from pathlib import Path

from bngrad_server.security.permissions import read_guarded
from bngrad_server.security.reload import ReloadedFiles
from bngrad_wire.token_format import SCHEME, hash_token, parse_line

logger = logging.getLogger(__name__)

_SCHEME = SCHEME.lower()
"""Its case counts for nothing."""


class Tokens:
    """The tokens of a file, which is read again when it changes."""

    def __init__(self, path: Path) -> None:
        """Reads the file.

        Raises:
            OSError: It cannot be read.
            ValueError: Every user of the host may change it, or a line of it is malformed; the message says which.
        """
        self._file = ReloadedFiles([path], lambda: _read(path))

    def refresh(self) -> None:
        """Reads the file again if it has changed, so that the log soon tells of a mistake there."""
        _ = self._file.content

    def owner(self, authorization: str | None) -> str | None:
        """Returns the owner of the token in an ``authorization`` header; None without a known token."""
        if authorization is None or authorization[: len(_SCHEME)].lower() != _SCHEME:
            return None
        presented = hash_token(authorization[len(_SCHEME) :].strip())
        owner = None
        for name, known in self._file.content:  # to the end, so that the time taken says nothing
            if hmac.compare_digest(known, presented):
                owner = name
        return owner


def _read(path: Path) -> list[tuple[str, bytes]]:
    tokens = []
    for number, line in enumerate(read_guarded(path, private=True).decode().splitlines(), 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        token = parse_line(text)
        if token is None:
            raise ValueError(f"line {number} of {path} must be NAME sha256:HASH, as `bngrad token new NAME` prints it")
        tokens.append(token)
    if not tokens:
        logger.warning("%s has no token, so every call is refused: add a line of `bngrad token new NAME`", path)
    return tokens
