"""A second reader of SSTs, written from server/docs/formats.md and nothing else.

It shares no code with the first: where both read the same from a golden file, the page says what
the code does.
"""

from __future__ import annotations

import struct
from itertools import pairwise
from typing import Any

Row = dict[str, Any]


def crc32c(data: bytes) -> int:
    """Section 1: bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def read(data: bytes) -> Row:
    """What the SST in `data` holds."""
    properties, checksum = _footer(data)
    numbers = struct.unpack_from("<15Q4I", properties, 64)
    first_key_len, last_key_len = numbers[17:]
    filter_at, filter_len, index_at, index_len = numbers[11:15]
    filter_bytes = data[filter_at : filter_at + filter_len]
    index = data[index_at : index_at + index_len]
    _require(numbers[10] == len(data))
    _require((crc32c(filter_bytes), crc32c(index)) == numbers[15:17])
    _require(len(properties) == 208 + first_key_len + last_key_len)
    rows = [row for block in _blocks(data, index, filter_at) for row in block]
    return {
        "object_id": properties[:16].hex(),
        "database_id": properties[16:32].hex(),
        "writer_nonce": properties[32:48].hex(),
        "write_id": properties[48:64].hex(),
        "numbers": numbers[:10],
        "object_kind": properties[200],
        "first_key": properties[208 : 208 + first_key_len],
        "last_key": properties[208 + first_key_len :],
        "checksum": f"{checksum:08x}",
        "filter": filter_bytes,
        "entries": [row for row in rows if "start" not in row],
        "range_tombstones": [row for row in rows if "start" in row],
    }


def _footer(data: bytes) -> tuple[bytes, int]:
    """Sections 3.2 and 3.3: the properties, and the checksum of the footer."""
    length, version, flags, checksum, magic = struct.unpack("<IHHI8s", data[-20:])
    _require((version, flags, magic) == (1, 0, b"ShaleSST"))
    properties = data[-20 - length : -20]
    _require(checksum == crc32c(properties + data[-20:-12]))
    return properties, checksum


def _blocks(data: bytes, index: bytes, blocks_end: int) -> list[list[Row]]:
    """Section 3.5: the rows of each block."""
    n, reserved = struct.unpack_from("<II", index)
    offsets = struct.unpack_from(f"<{n}Q", index, 8)
    lengths = struct.unpack_from(f"<{n}I", index, 8 + 8 * n)
    checksums = struct.unpack_from(f"<{n}I", index, 8 + 12 * n)
    rows = struct.unpack_from(f"<{n}I", index, 8 + 16 * n)
    key_offsets = struct.unpack_from(f"<{n + 1}I", index, 8 + 20 * n)
    sections_at = 12 + 24 * n
    first_keys = _strings(index[sections_at + n :], key_offsets)
    blocks = [data[at : at + size] for at, size in zip(offsets, lengths, strict=True)]
    _require(reserved == 0)
    _require(b"".join(blocks) == data[:blocks_end])
    _require([crc32c(block) for block in blocks] == list(checksums))
    result = [_rows(block) for block in blocks]
    _require([len(found) for found in result] == list(rows))
    _require([block[1] for block in blocks] == list(index[sections_at : sections_at + n]))
    _require([found[0].get("key", found[0].get("start")) for found in result] == first_keys)
    return result


def _rows(block: bytes) -> list[Row]:
    """Section 3.7: the rows of one block."""
    codec, section, reserved, raw_length, n, flags = struct.unpack_from("<BBHIII", block)
    _require((codec, reserved, flags & ~7) == (0, 0, 0))
    at = 16
    seqs = struct.unpack_from(f"<{n if flags & 2 else 1}Q", block, at)
    at += 8 * len(seqs)
    expiry = struct.unpack_from(f"<{n}Q", block, at) if flags & 1 else (0,) * n
    at += 8 * n if flags & 1 else 0
    key_offsets = struct.unpack_from(f"<{n + 1}I", block, at)
    value_offsets = struct.unpack_from(f"<{n + 1}I", block, at + 4 * (n + 1))
    at += 8 * (n + 1)
    kinds = block[at : at + n] if flags & 4 else bytes([3 if section == 1 else 1]) * n
    at += n if flags & 4 else 0
    keys = _strings(block[at:], key_offsets)
    at += key_offsets[-1]
    values = _strings(block[at:], value_offsets)
    _require(at + value_offsets[-1] == 8 + raw_length)
    _require(len(block) == -(-(8 + raw_length) // 8) * 8)
    all_seqs = seqs if flags & 2 else seqs * n
    return [_row(*row) for row in zip(kinds, keys, all_seqs, values, expiry, strict=True)]


def _row(kind: int, key: bytes, seq: int, value: bytes, expire_at_ms: int) -> Row:
    """Section 3.6: one entry, as the descriptions of golden files have it."""
    if kind == 3:
        return {"start": key, "end": value or None, "seq": seq}
    if kind == 2:
        return {"key": key, "seq": seq, "tombstone": True}
    expiry = {"expire_at_ms": expire_at_ms} if expire_at_ms else {}
    return {"key": key, "seq": seq, "put": value} | expiry


def _strings(data: bytes, offsets: tuple[int, ...]) -> list[bytes]:
    return [data[start:end] for start, end in pairwise(offsets)]


def _require(condition: object) -> None:
    if not condition:
        raise ValueError("the file contradicts the page")
