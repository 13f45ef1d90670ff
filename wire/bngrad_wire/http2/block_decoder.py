"""Decodes header blocks (RFC 7541), at a cost that the sender cannot choose, and checks them (RFC 9113, section 8)."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from hpack import HPACKError
from hpack.huffman_table import decode_huffman
from hpack.table import HeaderTable

HEADER_LIST_NBYTES = 16 * 1024
"""The most that a header list may take, counted as SETTINGS_MAX_HEADER_LIST_SIZE counts."""
_TABLE_NBYTES = 4096
"""The size of the dynamic table, which this package's SETTINGS leave as it is."""
_ENTRY_NBYTES = 32
_MAX_CACHED_BLOCKS = 64
_MAX_CACHED_BLOCK_NBYTES = 1024
_MAX_INTEGER_SHIFT = 28

REQUEST_PSEUDO_HEADERS = frozenset({":method", ":scheme", ":path", ":authority"})
RESPONSE_PSEUDO_HEADERS = frozenset({":status"})
_OPTIONAL_PSEUDO_HEADERS = frozenset({":authority"})
_CONNECTION_SPECIFIC = frozenset({"connection", "proxy-connection", "keep-alive", "transfer-encoding", "upgrade"})
_NAMES = re.compile(r"(?::?[!-9;-@\[-~]+\n)*")
# RFC 9113 also forbids blanks at the ends of values, but grpcio sends metadata and messages of statuses with them.
_FORBIDDEN_IN_VALUES = re.compile("[\0\r\n]")
_STATIC = tuple((name.decode(), value.decode()) for name, value in HeaderTable.STATIC_TABLE)


class HeaderBlock(NamedTuple):
    """A decoded header block.

    Attributes:
        headers: The headers; the values of a repeated name are joined by commas.
        fault: Why the block is malformed; empty if it is not.
        is_opening: Whether it has all pseudo-headers with which a request or a response begins.
        has_pseudo_headers: Whether it has any, which trailers must not have.
        is_too_large: Whether it holds more than `HEADER_LIST_NBYTES`; the rest is left out, and it was not checked.
        encoded: The block itself if it is short and always means the same; else empty.
    """

    headers: dict[str, str]
    fault: str
    is_opening: bool
    has_pseudo_headers: bool
    is_too_large: bool
    encoded: bytes = b""


class BlockDecoder:
    """Decodes the header blocks of one connection, with a cache of short ones.

    Args:
        pseudo_headers: What the peer may send: `REQUEST_PSEUDO_HEADERS` or `RESPONSE_PSEUDO_HEADERS`.
    """

    def __init__(self, pseudo_headers: AbstractSet[str]) -> None:
        self._allowed = pseudo_headers
        self._required = pseudo_headers - _OPTIONAL_PSEUDO_HEADERS
        self._table: deque[tuple[str, str]] = deque()  # the newest entry comes first
        self._table_nbytes = 0
        self._table_limit = _TABLE_NBYTES
        self._uses_table = self._changes_table = False
        self._cache: dict[bytes, HeaderBlock] = {}
        self._cache_of_table: dict[bytes, HeaderBlock] = {}  # of blocks that refer to the table as it is

    def known(self, block: bytes) -> HeaderBlock | None:
        """Returns the cached meaning of a block that does not change the dynamic table; None if there is none."""
        return self._cache.get(block) or self._cache_of_table.get(block)

    def decode(self, block: bytes) -> HeaderBlock:
        """Decodes a block; of one that is too large the rest only changes the dynamic table.

        Raises:
            HPACKError: The block cannot be decoded, so that no later block of the connection can be, either.
        """
        known = self.known(block)
        if known is not None:
            return known
        self._uses_table = self._changes_table = False
        try:
            decoded = self._decode(block)
        except IndexError as error:
            raise HPACKError("it is cut off, or refers to an entry that does not exist") from error
        if self._changes_table:
            self._cache_of_table.clear()
        elif len(block) <= _MAX_CACHED_BLOCK_NBYTES:
            # A block that does not refer to the dynamic table always means the same.
            cache = self._cache_of_table if self._uses_table else self._cache
            if len(cache) < _MAX_CACHED_BLOCKS:
                cache[block] = decoded = decoded if self._uses_table else decoded._replace(encoded=block)
        return decoded

    def _decode(self, block: bytes) -> HeaderBlock:
        headers: dict[str, str] = {}
        fault = ""
        room = HEADER_LIST_NBYTES
        position = self._change_limit(block)
        while position < len(block):
            first = block[position]
            if room < 0 and not first & 0x40:
                position = _skip(block, position)
                continue
            if first & 0x80:
                index, position = _integer(block, position, 0x7F)
                name, value = self._entry(index)
            elif first & 0x40:
                name, value, position = self._literal(block, position, 0x3F)
                self._add(name, value)
            elif first & 0x20:
                raise HPACKError("it changes the size of the table after its first field")
            else:
                name, value, position = self._literal(block, position, 0x0F)
            room -= len(name) + len(value) + _ENTRY_NBYTES
            if room < 0:
                continue
            if name[:1] == ":":
                fault = fault or self._fault_of_pseudo_header(name, headers)
                headers[name] = value
            else:
                headers[name] = f"{headers[name]},{value}" if name in headers else value
        if room < 0:
            return HeaderBlock(headers, "", is_opening=False, has_pseudo_headers=False, is_too_large=True)
        has_pseudo_headers = any(name[:1] == ":" for name in headers)
        is_opening = all(headers.get(name) for name in self._required)
        return HeaderBlock(headers, fault or _fault(headers), is_opening, has_pseudo_headers, is_too_large=False)

    def _fault_of_pseudo_header(self, name: str, before: dict[str, str]) -> str:
        if name not in self._allowed:
            return f"the pseudo-header {name!r} does not exist here"
        if name in before:
            return f"{name} comes twice"
        if before and next(reversed(before))[:1] != ":":
            return f"{name} comes after a regular header"
        return ""

    def _change_limit(self, block: bytes) -> int:
        """Applies the table sizes with which a block may begin; returns where the fields start."""
        position = 0
        while position < len(block) and block[position] & 0xE0 == 0x20:
            self._changes_table = True
            limit, position = _integer(block, position, 0x1F)
            if limit > _TABLE_NBYTES:
                raise HPACKError(f"it sets the table to {limit} bytes; the limit is {_TABLE_NBYTES}")
            self._table_limit = limit
            self._evict()
        return position

    def _literal(self, block: bytes, position: int, mask: int) -> tuple[str, str, int]:
        index, position = _integer(block, position, mask)
        if index:
            name = self._entry(index)[0]
        else:
            name, position = _string(block, position)
        value, position = _string(block, position)
        return name, value, position

    def _entry(self, index: int) -> tuple[str, str]:
        if not index:
            raise HPACKError("it refers to the entry 0")
        if index <= len(_STATIC):
            return _STATIC[index - 1]
        self._uses_table = True
        return self._table[index - 1 - len(_STATIC)]

    def _add(self, name: str, value: str) -> None:
        self._changes_table = True
        self._table.appendleft((name, value))
        self._table_nbytes += len(name) + len(value) + _ENTRY_NBYTES
        self._evict()

    def _evict(self) -> None:
        while self._table_nbytes > self._table_limit:
            name, value = self._table.pop()
            self._table_nbytes -= len(name) + len(value) + _ENTRY_NBYTES


def _fault(headers: dict[str, str]) -> str:
    """Returns why headers are malformed, apart from their pseudo-headers; empty if they are not."""
    names = "\n".join([*headers, ""])
    if _NAMES.fullmatch(names) is None or names.count("\n") != len(headers):
        return "a header's name has upper-case letters, or characters that none may have"
    if _FORBIDDEN_IN_VALUES.search("".join(headers.values())):
        return "a header's value has a line break or a zero byte"
    if not _CONNECTION_SPECIFIC.isdisjoint(headers):
        return "a header belongs to connections of HTTP/1"
    if headers.get("te", "trailers") != "trailers":
        return f"te is {headers['te']!r}; only 'trailers' is allowed"
    return ""


def _integer(block: bytes, position: int, mask: int) -> tuple[int, int]:
    """Returns the integer at a position, and the position after it."""
    value = block[position] & mask
    position += 1
    if value < mask:
        return value, position
    shift = 0
    while True:
        byte = block[position]
        position += 1
        value += (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > _MAX_INTEGER_SHIFT:
            raise HPACKError("an integer is too large")


def _string(block: bytes, position: int) -> tuple[str, int]:
    """Returns the string at a position, and the position after it.

    Bytes become characters one by one, so that sizes are what the sender counts; gRPC's headers are ASCII anyway.
    """
    is_compressed = block[position] & 0x80
    length, start = _integer(block, position, 0x7F)
    end = start + length
    if end > len(block):
        raise IndexError
    data = block[start:end]
    return (decode_huffman(data) if is_compressed else data).decode("latin-1"), end


def _skip(block: bytes, position: int) -> int:
    """Returns the position after a field that does not change the table."""
    first = block[position]
    if first & 0x80:
        return position + 1 if first != 0xFF else _integer(block, position, 0x7F)[1]
    if first & 0x20:
        raise HPACKError("it changes the size of the table after its first field")
    index, position = _integer(block, position, 0x0F)
    for _ in range(1 if index else 2):
        length, position = _integer(block, position, 0x7F)
        position += length
    if position > len(block):
        raise IndexError
    return position
