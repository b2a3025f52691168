"""The algorithms that server/docs/formats.md names, from their own specifications."""

from __future__ import annotations

import struct

_MASK = 2**64 - 1
_PRIME_1, _PRIME_2, _PRIME_3, _PRIME_4, _PRIME_5 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)


def crc32c(data: bytes) -> int:
    """CRC-32C, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def xxh64(data: bytes, seed: int) -> int:
    """XXH64 as its specification describes it, step by step."""
    at = 0
    if len(data) < 32:
        result = seed + _PRIME_5 & _MASK
    else:
        lanes = [seed + _PRIME_1 + _PRIME_2, seed + _PRIME_2, seed, seed - _PRIME_1]
        while at + 32 <= len(data):
            words = struct.unpack_from("<4Q", data, at)
            lanes = [_round(lane, word) for lane, word in zip(lanes, words, strict=True)]
            at += 32
        shifts = zip(lanes, (1, 7, 12, 18), strict=True)
        result = sum(_rotated(lane, shift) for lane, shift in shifts) & _MASK
        for lane in lanes:
            result = (result ^ _round(0, lane)) * _PRIME_1 + _PRIME_4 & _MASK
    result = result + len(data) & _MASK
    while at + 8 <= len(data):
        (word,) = struct.unpack_from("<Q", data, at)
        result = _rotated(result ^ _round(0, word), 27) * _PRIME_1 + _PRIME_4 & _MASK
        at += 8
    if at + 4 <= len(data):
        (word,) = struct.unpack_from("<I", data, at)
        result = _rotated(result ^ word * _PRIME_1 & _MASK, 23) * _PRIME_2 + _PRIME_3 & _MASK
        at += 4
    for byte in data[at:]:
        result = _rotated(result ^ byte * _PRIME_5 & _MASK, 11) * _PRIME_1 & _MASK
    result = (result ^ result >> 33) * _PRIME_2 & _MASK
    result = (result ^ result >> 29) * _PRIME_3 & _MASK
    return result ^ result >> 32


def _round(lane: int, word: int) -> int:
    return _rotated(lane + word * _PRIME_2 & _MASK, 31) * _PRIME_1 & _MASK


def _rotated(number: int, bits: int) -> int:
    return (number << bits | number >> 64 - bits) & _MASK


def lz4_block(data: bytes) -> bytes:
    """What a block of the LZ4 block format stands for."""
    result = bytearray()
    at = 0
    while True:
        token = data[at]
        literals, at = _length(data, at + 1, token >> 4)
        result += data[at : at + literals]
        at += literals
        if at >= len(data):
            return bytes(result)
        distance = int.from_bytes(data[at : at + 2], "little")
        matched, at = _length(data, at + 2, token & 15)
        for _ in range(matched + 4):
            result.append(result[-distance])


def _length(data: bytes, at: int, nibble: int) -> tuple[int, int]:
    """A length that begins with four bits of a token, and where the bytes that continue it end."""
    length = nibble
    if nibble == 15:
        while True:
            length += data[at]
            at += 1
            if data[at - 1] != 255:
                break
    return length, at
