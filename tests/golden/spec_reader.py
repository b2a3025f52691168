"""A second reader of SSTs, written from server/docs/formats.md and nothing else.

It shares no code with the first but the libraries for checksums, hashes and codecs: where both read
the same from a golden file, the page says what the code does.
"""

from __future__ import annotations

import struct
from itertools import pairwise
from typing import Any

import lz4.block
import zstandard
from google_crc32c import value as crc32c
from xxhash import xxh64_intdigest

Row = dict[str, Any]


def read(data: bytes) -> Row:
    properties, checksum = _footer(data)
    numbers = struct.unpack_from("<15Q4I", properties, 64)
    first_key_len, last_key_len = numbers[17:]
    filter_at, filter_len, index_at, index_len = numbers[11:15]
    filter_bytes = data[filter_at : filter_at + filter_len]
    index = data[index_at : index_at + index_len]
    _require(numbers[10] == len(data))
    _require((crc32c(filter_bytes), crc32c(index)) == numbers[15:17])
    _require(len(properties) == 208 + first_key_len + last_key_len)
    sections = _sections(data, index, filter_at)
    system = [row | _record(row) for row in sections.pop(2, [])]
    control = [row | _load(row) for row in sections.pop(3, [])]
    points, ranges = sections.pop(0, []), sections.pop(1, [])
    _require(not sections)
    _require(not control or (properties[200] == 0 and not points and not ranges))
    counts = (sum("put" in row for row in points), sum("tombstone" in row for row in points))
    _require(numbers[4:8] == (*counts, len(ranges), len(system) + len(control)))
    _require(points or ranges or not (first_key_len or last_key_len))
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
        "entries": points,
        "range_tombstones": ranges,
        "system": system,
        "control": control,
    }


def _footer(data: bytes) -> tuple[bytes, int]:
    """Sections 3.2 and 3.3: the properties, and the checksum of the footer."""
    length, version, flags, checksum, magic = struct.unpack("<IHHI8s", data[-20:])
    _require((version, flags, magic) == (1, 0, b"ShaleSST"))
    properties = data[-20 - length : -20]
    _require(checksum == crc32c(properties + data[-20:-12]))
    return properties, checksum


def _sections(data: bytes, index: bytes, blocks_end: int) -> dict[int, list[Row]]:
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
    found = [_rows(block) for block in blocks]
    numbers = [*index[sections_at : sections_at + n]]
    _require([len(block) for block in found] == list(rows))
    _require([block[1] for block in blocks] == numbers == sorted(numbers))
    _require([block[0].get("key", block[0].get("start")) for block in found] == first_keys)
    result: dict[int, list[Row]] = {}
    for number, block in zip(numbers, found, strict=True):
        result.setdefault(number, []).extend(block)
    return result


def _rows(block: bytes) -> list[Row]:
    block = _plain(block)
    section, raw_length, n, flags = struct.unpack_from("<xBxxIII", block)
    _require(flags & ~7 == 0)
    at = 16
    seqs = struct.unpack_from(f"<{n if flags & 2 else 1}Q", block, at)
    at += 8 * len(seqs)
    expiry = struct.unpack_from(f"<{n}Q", block, at) if flags & 1 else (0,) * n
    at += 8 * n if flags & 1 else 0
    key_offsets = struct.unpack_from(f"<{n + 1}I", block, at)
    value_offsets = struct.unpack_from(f"<{n + 1}I", block, at + 4 * (n + 1))
    at += 8 * (n + 1)
    kinds = block[at : at + n] if flags & 4 else bytes([(1, 3, 1, 4)[section]]) * n
    at += n if flags & 4 else 0
    keys = _strings(block[at:], key_offsets)
    at += key_offsets[-1]
    values = _strings(block[at:], value_offsets)
    _require(at + value_offsets[-1] == 8 + raw_length)
    all_seqs = seqs if flags & 2 else seqs * n
    return [_row(*row) for row in zip(kinds, keys, all_seqs, values, expiry, strict=True)]


def _plain(block: bytes) -> bytes:
    codec, reserved, raw_length = struct.unpack_from("<BxHI", block)
    _require(codec in (0, 1, 2) and reserved == 0)
    start = 8 if codec == 0 else 12
    (length,) = (raw_length,) if codec == 0 else struct.unpack_from("<I", block, 8)
    _require(len(block) == -(-(start + length) // 8) * 8)
    stored = block[start : start + length]
    if codec == 1:
        frame = zstandard.ZstdDecompressor().decompressobj()
        stored = frame.decompress(stored)
        _require(frame.eof and not frame.unused_data)
    elif codec == 2:
        stored = lz4.block.decompress(stored, uncompressed_size=raw_length)
    _require(len(stored) == raw_length)
    return block[:8] + stored


def may_contain(filter_bytes: bytes, key: bytes) -> bool:
    """Section 3.4: what the filter says about a key."""
    kind, p, reserved, n = struct.unpack_from("<BBHI", filter_bytes)
    _require((kind, reserved) == (1, 0) and p in (3, 6) and n > 0)
    _require(len(filter_bytes) == 16 + 64 * n)
    h = xxh64_intdigest(key, 0x5368616C65535354)
    line = (h // 2**32) * n // 2**32
    x = h % 2**32
    y = x * 0x9E3779B97F4A7C15 % 2**64 // 2**37
    bits = [x % 512, x // 2**9 % 512, x // 2**18 % 512]
    if p == 6:
        bits += [y % 512, y // 2**9 % 512, y // 2**18 % 512]
    at = 16 + 64 * line
    return all(filter_bytes[at + b // 8] >> b % 8 & 1 for b in bits)


def _row(kind: int, key: bytes, seq: int, value: bytes, expire_at_ms: int) -> Row:
    """Section 3.6: one entry, as the descriptions of golden files have it."""
    if kind == 3:
        return {"start": key, "end": value or None, "seq": seq}
    if kind == 2:
        return {"key": key, "seq": seq, "tombstone": True}
    if kind == 4:
        return {"key": key, "seq": seq, "value": value}
    expiry = {"expire_at_ms": expire_at_ms} if expire_at_ms else {}
    return {"key": key, "seq": seq, "put": value} | expiry


def _record(row: Row) -> Row:
    """Section 3.8: what an entry of the system says beside its key and value."""
    key = row["key"]
    _require(key[0] == 1 and 2 <= len(key) <= 65)
    if "tombstone" in row:
        return {"client_key": key[1:]}
    request_hash, wal_id, reply_kind, reserved = struct.unpack_from("<16sQB7s", row["put"])
    _require(reply_kind in range(1, 6) and reserved == bytes(7))
    return {
        "client_key": key[1:],
        "request_hash": request_hash.hex(),
        "wal_id": wal_id,
        "reply_kind": reply_kind,
        "reply": row["put"][32:],
    }


def _load(row: Row) -> Row:
    """Section 3.9: what the record of a load says, but for its files."""
    _require(1 <= len(row["key"]) <= 256 and row["value"][:8] == b"\x01" + bytes(7))
    return {"load_id": row["key"].decode()}


def _strings(data: bytes, offsets: tuple[int, ...]) -> list[bytes]:
    return [data[start:end] for start, end in pairwise(offsets)]


def _require(condition: object) -> None:
    if not condition:
        raise ValueError("the file contradicts the page")
