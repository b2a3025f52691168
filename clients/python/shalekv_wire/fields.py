"""Decoder of header blocks: HPACK (RFC 7541) with its dynamic table.

Clients that send a deadline add a field to the dynamic table with nearly every call, so blocks are
decoded for nearly every call. Strings in Huffman code are decoded by the `hpack` package, and kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from shalekv_wire.frames import DEFAULT_TABLE_BYTES, ConnectionFault, ErrorCode

Field: TypeAlias = tuple[bytes, bytes]
Fields: TypeAlias = Sequence[Field]

ENTRY_OVERHEAD_BYTES = 32  # of an entry of the dynamic table, and of a field in the size of a list
STRINGS_MAX = 1_024  # in Huffman code that are kept, for all connections
STRING_BYTES_MAX = 64  # longer ones are not kept

# RFC 7541, appendix A. The `hpack` package has it, too, but is slow to import.
_STATIC: tuple[Field, ...] = (
    (b":authority", b""),
    (b":method", b"GET"),
    (b":method", b"POST"),
    (b":path", b"/"),
    (b":path", b"/index.html"),
    (b":scheme", b"http"),
    (b":scheme", b"https"),
    (b":status", b"200"),
    (b":status", b"204"),
    (b":status", b"206"),
    (b":status", b"304"),
    (b":status", b"400"),
    (b":status", b"404"),
    (b":status", b"500"),
    (b"accept-charset", b""),
    (b"accept-encoding", b"gzip, deflate"),
    (b"accept-language", b""),
    (b"accept-ranges", b""),
    (b"accept", b""),
    (b"access-control-allow-origin", b""),
    (b"age", b""),
    (b"allow", b""),
    (b"authorization", b""),
    (b"cache-control", b""),
    (b"content-disposition", b""),
    (b"content-encoding", b""),
    (b"content-language", b""),
    (b"content-length", b""),
    (b"content-location", b""),
    (b"content-range", b""),
    (b"content-type", b""),
    (b"cookie", b""),
    (b"date", b""),
    (b"etag", b""),
    (b"expect", b""),
    (b"expires", b""),
    (b"from", b""),
    (b"host", b""),
    (b"if-match", b""),
    (b"if-modified-since", b""),
    (b"if-none-match", b""),
    (b"if-range", b""),
    (b"if-unmodified-since", b""),
    (b"last-modified", b""),
    (b"link", b""),
    (b"location", b""),
    (b"max-forwards", b""),
    (b"proxy-authenticate", b""),
    (b"proxy-authorization", b""),
    (b"range", b""),
    (b"referer", b""),
    (b"refresh", b""),
    (b"retry-after", b""),
    (b"server", b""),
    (b"set-cookie", b""),
    (b"strict-transport-security", b""),
    (b"transfer-encoding", b""),
    (b"user-agent", b""),
    (b"vary", b""),
    (b"via", b""),
    (b"www-authenticate", b""),
)
_STATIC_COUNT = len(_STATIC)
_INTEGER_BITS_MAX = 28
_strings: dict[bytes, bytes] = {}


class FieldDecoder:
    """Decodes the blocks of one direction of a connection, in their order."""

    __slots__ = ("_bytes_max", "_entries", "_list_bytes_max", "_size_bytes", "changes")

    def __init__(self, list_bytes_max: int) -> None:
        """A list over `list_bytes_max` bytes (each field: name, value and 32) ends a connection."""
        self._list_bytes_max = list_bytes_max
        self._entries: list[Field] = []  # of the dynamic table, the newest first
        self._size_bytes = 0
        self._bytes_max = DEFAULT_TABLE_BYTES
        self.changes = 0  # of the dynamic table so far

    def decode(self, block: bytes) -> tuple[list[Field], int]:
        """Decode a complete block; returns the fields and the size of the list in bytes.

        Raises `ConnectionFault`: the block cannot be decoded, so no later one can be.
        """
        try:
            return self._decode(block)
        except IndexError:
            text = "the header block is cut off, or refers to what is not there"
            raise ConnectionFault(ErrorCode.COMPRESSION_ERROR, text) from None

    def _decode(self, block: bytes) -> tuple[list[Field], int]:
        fields: list[Field] = []
        at, end, list_bytes = 0, len(block), 0
        while at < end:
            first = block[at]
            if first & 0x80:
                index, at = _integer(block, at, 0x7F)
                field = self._entry(index)
            elif first & 0x40:
                field, at = self._literal(block, at, 0x3F)
                self._add(field)
            elif first & 0x20:
                at = self._resize(block, at, is_first=not fields)
                continue
            else:
                field, at = self._literal(block, at, 0x0F)
            fields.append(field)
            list_bytes += len(field[0]) + len(field[1]) + ENTRY_OVERHEAD_BYTES
            if list_bytes > self._list_bytes_max:
                text = f"a header list over {self._list_bytes_max} bytes"
                raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, text)
        return fields, list_bytes

    def _entry(self, index: int) -> Field:
        if index > _STATIC_COUNT:
            return self._entries[index - _STATIC_COUNT - 1]
        if index == 0:
            raise IndexError
        return _STATIC[index - 1]

    def _literal(self, block: bytes, at: int, mask: int) -> tuple[Field, int]:
        index, at = _integer(block, at, mask)
        if index:
            name = self._entry(index)[0]
        else:
            name, at = _string(block, at)
        value, at = _string(block, at)
        return (name, value), at

    def _add(self, field: Field) -> None:
        self.changes += 1
        self._entries.insert(0, field)
        self._size_bytes += len(field[0]) + len(field[1]) + ENTRY_OVERHEAD_BYTES
        self._evict()

    def _evict(self) -> None:
        while self._size_bytes > self._bytes_max:
            name, value = self._entries.pop()
            self._size_bytes -= len(name) + len(value) + ENTRY_OVERHEAD_BYTES

    def _resize(self, block: bytes, at: int, *, is_first: bool) -> int:
        size_bytes, at = _integer(block, at, 0x1F)
        if not is_first or size_bytes > DEFAULT_TABLE_BYTES:
            text = "a change of the table's size that is late, or over the limit"
            raise ConnectionFault(ErrorCode.COMPRESSION_ERROR, text)
        self.changes += 1
        self._bytes_max = size_bytes
        self._evict()
        return at


def _integer(block: bytes, at: int, mask: int) -> tuple[int, int]:
    """Decode an integer whose first byte has the bits of `mask`; returns it and the next place."""
    number = block[at] & mask
    at += 1
    if number < mask:
        return number, at
    bits = 0
    while True:
        byte = block[at]
        at += 1
        number += (byte & 0x7F) << bits
        if byte < 0x80:  # noqa: PLR2004 - the last byte, RFC 7541, 5.1
            return number, at
        bits += 7
        if bits > _INTEGER_BITS_MAX:
            raise IndexError


def _string(block: bytes, at: int) -> tuple[bytes, int]:
    """Decode a string; returns it and the next place."""
    is_huffman = block[at] & 0x80
    size, begin = _integer(block, at, 0x7F)
    end = begin + size
    data = block[begin:end]
    if len(data) != size:
        raise IndexError
    if not is_huffman:
        return data, end
    known = _strings.get(data)
    if known is not None:
        return known, end
    decoded = _huffman_decoded(data)
    if size <= STRING_BYTES_MAX:
        if len(_strings) >= STRINGS_MAX:
            _strings.clear()
        _strings[data] = decoded
    return decoded, end


def _huffman_decoded(data: bytes) -> bytes:
    from hpack.exceptions import HPACKError
    from hpack.huffman_table import decode_huffman

    try:
        return bytes(decode_huffman(data))
    except HPACKError:
        raise IndexError from None
