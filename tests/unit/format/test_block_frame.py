"""Compressed blocks hold the same rows, or are refused before memory is allocated for them."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random

import lz4.block
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from shalekv.errors import BadStructure, CorruptObject, Truncated, UnsupportedVersion
from shalekv.format import block_frame
from shalekv.format.block import Block, encode_block, parse_block
from shalekv.format.block_frame import Codec, compressed, compressor
from shalekv.format.coding import Piece
from shalekv.format.columns import Section, columns_of
from shalekv.protocol.entry import Entry
from tests.kit.forging import patched, u32
from tests.kit.samples import points, put

OFFSET = 4096  # offset of a test's block in its object
ROWS = [put(b"key %04d" % number, 7, b"value of key %04d" % number) for number in range(50)]

codecs = pytest.mark.parametrize("codec", [Codec.ZSTD, Codec.LZ4])


def encoded(entries: list[Entry], codec: Codec) -> bytes:
    """Return the block of these entries, as an SST with this codec has it."""
    block = encode_block(Section.POINTS, columns_of(entries))
    compress = compressor(codec)
    return block if compress is None else compressed(block, codec, compress)


def parsed(data: bytes) -> Block:
    return parse_block(Piece("levels/x.sst", OFFSET, data))


def framed(codec: Codec, stored: bytes, raw_len: int, stored_len: int | None = None) -> bytes:
    """Return a block whose header need not agree with its bytes."""
    length = len(stored) if stored_len is None else stored_len
    block = struct.pack("<BBHII", codec, Section.POINTS, 0, raw_len, length) + stored
    return block + bytes(-len(block) % 8)


def squeezed(codec: Codec, raw: bytes) -> bytes:
    """Return bytes as a codec stores them, without the code under test."""
    if codec is Codec.ZSTD:
        return zstandard.ZstdCompressor().compress(raw)
    stored: bytes = lz4.block.compress(raw, store_size=False)
    return stored


RAW = encoded(ROWS, Codec.NONE)[8:]
RAW_LEN = int.from_bytes(encoded(ROWS, Codec.NONE)[4:8], "little")
RAW = RAW[:RAW_LEN]


@codecs
@given(points.filter(bool), st.integers(0, 400))
def test_a_compressed_block_is_the_same_block(
    codec: Codec, entries: list[Entry], tail_bytes: int
) -> None:
    """A block returns its rows whatever its codec, and is never larger with one."""
    rows = [*entries, put(b"\xff" * 9, 1, b"v" * tail_bytes)]
    data, raw = encoded(rows, codec), encoded(rows, Codec.NONE)
    assert len(data) % 8 == 0
    assert len(data) < len(raw) or data == raw
    block = parsed(data)
    assert block == parsed(raw)
    assert list(block.columns().entries()) == rows
    assert [block.find(entry.key, entry.seq) for entry in rows] == rows


@codecs
def test_noise_is_stored_as_it_is(codec: Codec) -> None:
    """A block that does not shrink by a whole 8 bytes keeps codec 0."""
    rows = [put(b"k", 0x0123456789ABCDEF, Random(5).randbytes(900))]
    assert encoded(rows, codec) == encoded(rows, Codec.NONE)
    raw = encoded(ROWS, Codec.NONE)
    for saved in range(-8, 24):
        data = compressed(raw, codec, lambda _, saved=saved: bytes(RAW_LEN - saved))  # type: ignore[misc]
        assert len(data) < len(raw) or data == raw


def test_what_lz4_does_not_take_is_not_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block beyond the limit of the library is stored as it is."""
    monkeypatch.setattr(block_frame, "_LZ4_RAW_BYTES_MAX", RAW_LEN - 1)
    assert encoded(ROWS, Codec.LZ4) == encoded(ROWS, Codec.NONE)
    assert encoded(ROWS[1:], Codec.LZ4) != encoded(ROWS[1:], Codec.NONE)
    assert encoded(ROWS, Codec.ZSTD) != encoded(ROWS, Codec.NONE)


@codecs
def test_blocks_of_several_threads_do_not_mix(codec: Codec) -> None:
    """Threads that decompress concurrently each get their own block."""
    blocks = [
        [put(b"%d" % number, number, b"%d" % number * 20_000) for number in range(first, first + 5)]
        for first in range(0, 5 * 40, 5)
    ]

    def trial(rows: list[Entry]) -> bool:
        data = encoded(sorted(rows), codec)
        return all(list(parsed(data).columns().entries()) == sorted(rows) for _ in range(5))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(trial, blocks))


@codecs
@pytest.mark.parametrize(
    ("change", "error", "problem"),
    [
        (lambda data: patched(data, 0, b"\x03"), BadStructure, "codec"),
        (lambda data: patched(data, 1, b"\x04"), BadStructure, "expected a section"),
        (lambda data: patched(data, 2, b"\x01"), UnsupportedVersion, "reserved"),
        (lambda data: patched(data, 4, u32(RAW_LEN + 1)), BadStructure, r"zstd|lz4"),
        (lambda data: patched(data, 4, u32(RAW_LEN - 1)), BadStructure, r"zstd|lz4"),
        (lambda data: patched(data, 4, u32(0)), BadStructure, r"zstd|lz4"),
        (lambda data: patched(data, 4, u32(2**31)), BadStructure, "above"),
        (lambda data: patched(data, 4, u32(2**32 - 1)), BadStructure, "above"),
        (lambda data: patched(data, 8, u32(len(data))), Truncated, "compressed bytes"),
        (lambda data: patched(data, 8, u32(2**32 - 1)), Truncated, "compressed bytes"),
        (lambda data: patched(data, 8, u32(0)), BadStructure, "stored length"),
        (lambda data: data + bytes(8), BadStructure, "stored length"),
        (lambda data: data[:11], Truncated, "stored length"),
        (lambda data: data[:7], Truncated, "block header"),
        (lambda data: patched(data, 12, b"\xff" * 6), BadStructure, r"zstd|lz4"),
    ],
)
def test_what_contradicts_the_format_is_refused(
    codec: Codec, change: Callable[[bytes], bytes], error: type[CorruptObject], problem: str
) -> None:
    """An impossible frame is a typed error that names the byte."""
    with pytest.raises(error, match=problem) as caught:
        parsed(change(encoded(ROWS, codec)))
    assert caught.value.offset >= OFFSET


@codecs
def test_compressed_bytes_must_fill_their_place(codec: Codec) -> None:
    """Too many compressed bytes, or too few, are refused."""
    stored = squeezed(codec, RAW)
    assert parsed(framed(codec, stored, RAW_LEN)).rows == len(ROWS)
    for wrong in (stored + b"\x00", stored + stored, stored[:-1], b""):
        with pytest.raises(BadStructure):
            parsed(framed(codec, wrong, RAW_LEN))


def test_a_frame_that_hides_its_size_is_refused() -> None:
    """A zstd frame without its content size is refused, so that memory is bounded beforehand."""
    hidden = zstandard.ZstdCompressor(write_content_size=False).compress(RAW)
    with pytest.raises(BadStructure, match="zstd"):
        parsed(framed(Codec.ZSTD, hidden, RAW_LEN))
    with pytest.raises(BadStructure, match="zstd"):
        parsed(framed(Codec.ZSTD, b"", 0))


@codecs
def test_a_bomb_takes_no_memory(codec: Codec) -> None:
    """A block that claims too much, or holds more than it claims, allocates no memory."""
    bomb = squeezed(codec, bytes(64 << 20))
    tracemalloc.start()
    try:
        for raw_len in (2**31 - 1, 2**31, 2**32 - 1, 1000):
            for stored in (bomb[:2000], bomb):
                if raw_len < 2**31 or len(stored) == 2000:
                    with pytest.raises(CorruptObject):
                        parsed(framed(codec, stored, raw_len))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2 * len(bomb) + (1 << 20)


def test_a_zstd_frame_of_the_best_ratio_is_read() -> None:
    """The best ratio of a zstd frame, 128 KiB of one byte in 4 bytes, is within the limit."""
    count = 64
    raw_len = count << 17
    blocks = b"".join(
        struct.pack("<I", (number == count - 1) | 1 << 1 | 1 << 20)[:3] + b"\x00"
        for number in range(count)
    )
    frame = b"\x28\xb5\x2f\xfd\xa0" + u32(raw_len) + blocks
    assert zstandard.ZstdDecompressor().decompress(frame) == bytes(raw_len)
    with pytest.raises(BadStructure, match="one row"):
        parsed(framed(Codec.ZSTD, frame, raw_len))
