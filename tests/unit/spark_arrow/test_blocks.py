"""Blocks as arrays, beside what the format package makes of the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from shalekv.core.entry import Entry
from shalekv.errors import BadChecksum, BadStructure, CorruptObject, Truncated
from shalekv.format.block_frame import Codec
from shalekv.format.columns import Columns, columns_of
from shalekv.format.section import Section
from shalekv.format.sst import Sst, open_sst
from shalekv.format.sst_encode import encode_sst
from shalekv_spark.arrow import blocks
from shalekv_spark.arrow.blocks import rows_of_blocks
from shalekv_spark.arrow.rows import Rows, rows_of
from tests.kit.forging import resealed
from tests.kit.samples import LEVEL_NAME, properties, put, tombstone
from tests.unit.spark_arrow.ground import CODECS

ALL_FLAGS = [
    *(put(b"a%03d" % number, 7, b"v" * 9) for number in range(30)),  # one number for all
    *(put(b"b%03d" % number, 100 - number, b"", number % 2) for number in range(30)),
    *(tombstone(b"c%03d" % number, number + 1) for number in range(30)),
    *(put(b"d", 90 - number, b"version %d" % number) for number in range(30)),
]


def encoded(entries: Sequence[Entry], codec: Codec = Codec.NONE, block_bytes: int = 100) -> bytes:
    return encode_sst(properties(LEVEL_NAME), entries, block_bytes=block_bytes, codec=codec)


def opened(data: bytes, listed_seq: int = 0) -> Sst:
    return open_sst(LEVEL_NAME, data, database_id=None, listed_seq=listed_seq)


def rows_in(sst: Sst, *, with_values: bool = True) -> Rows:
    numbers = sst.index.blocks_of(Section.POINTS)
    end = sst.index[numbers[-1]].offset + sst.index[numbers[-1]].length
    data = sst.data[sst.index[numbers[0]].offset : end]
    return rows_of_blocks(sst.index, numbers, data, with_values=with_values)


def columns_in(sst: Sst) -> Columns:
    return columns_of([*sst.entries()])


def told(rows: Rows) -> list[list[Any] | None]:
    values = None if rows.values is None else rows.values.to_pylist()
    kinds = None if rows.kinds is None else rows.kinds.tolist()
    expire_at_ms = None if rows.expire_at_ms is None else rows.expire_at_ms.tolist()
    return [rows.keys.to_pylist(), values, rows.seqs.tolist(), kinds, expire_at_ms]


def outcome(work: Callable[[], Rows]) -> object:
    try:
        return told(work())
    except CorruptObject as error:
        return type(error), str(error)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("block_bytes", [100, 100_000])
@pytest.mark.parametrize("with_values", [True, False])
def test_all_that_blocks_may_have(
    monkeypatch: pytest.MonkeyPatch, codec: Codec, block_bytes: int, *, with_values: bool
) -> None:
    """Numbers and expiry for all rows or for each, tombstones and versions: no row is decoded by
    itself, and nothing differs.
    """

    def refused(*_: object) -> Columns:
        raise AssertionError("decoded row by row")

    monkeypatch.setattr(blocks, "read_block", refused)
    sst = opened(encoded(ALL_FLAGS, codec, block_bytes))
    expected = rows_of(columns_in(sst), with_values=with_values)
    assert told(rows_in(sst, with_values=with_values)) == told(expected)


def test_rows_of_a_load() -> None:
    """Rows that were written without a number have the one that lists their file."""
    entries = [put(b"%03d" % number, 0, b"v") for number in range(50)]
    rows = rows_in(opened(encoded(entries), listed_seq=12))
    assert set(rows.seqs.tolist()) == {12}


def test_bytes_that_were_damaged() -> None:
    """A checksum that does not match, and bytes that are missing, are refused as always."""
    sst = opened(encoded(ALL_FLAGS))
    numbers = sst.index.blocks_of(Section.POINTS)
    end = sst.index[numbers[-1]].offset + sst.index[numbers[-1]].length
    damaged = bytearray(sst.data[:end])
    damaged[end // 2] ^= 1
    with pytest.raises(BadChecksum):
        rows_of_blocks(sst.index, numbers, bytes(damaged), with_values=False)
    with pytest.raises(Truncated):
        rows_of_blocks(sst.index, numbers, sst.data[: end - 8], with_values=False)


def test_blocks_out_of_order() -> None:
    """Each block may be in order, and so may their first keys: they overlap all the same."""
    data = encoded(
        [put(b"a", 1, bytes(60)), put(b"d", 1, bytes(60)), put(b"e", 1, bytes(60))], block_bytes=140
    )
    forged = data.replace(b"ad" + bytes(60), b"az" + bytes(60))
    assert forged != data
    with pytest.raises(BadStructure, match="ends with the same key or above"):
        rows_in(opened(resealed(LEVEL_NAME, data, forged)))


SMALL = [put(b"a", 5, b"v", 8), tombstone(b"a", 4), tombstone(b"b", 3), put(b"c", 2, b"xy")]
WIDE = [put(b"a", 5, bytes(50)), put(b"b", 6, bytes(50)), put(b"c", 5, b"not zeros alone")]
UNNUMBERED = [put(b"a", 0, b"v"), put(b"b", 0, b"w"), put(b"bb", 0, b"")]


def decoded(sst: Sst) -> Rows:
    return rows_of(columns_in(sst), with_values=True)


@pytest.mark.parametrize(
    ("entries", "block_bytes", "codec"),
    [
        (SMALL, 20, Codec.NONE),
        (SMALL, 1_000, Codec.NONE),
        (UNNUMBERED, 20, Codec.NONE),
        (UNNUMBERED, 1_000, Codec.NONE),
        (WIDE, 100, Codec.LZ4),
        (WIDE, 1_000, Codec.LZ4),
    ],
)
def test_every_byte_that_a_writer_may_get_wrong(
    entries: list[Entry], block_bytes: int, codec: Codec
) -> None:
    """Each byte of blocks that have all columns, or the fewest: refused with the same error under
    a checksum that matches, or read the same.
    """
    data = encoded(entries, codec, block_bytes)
    listed_seq = 0 if entries[0].seq else 9
    errors = set()
    for at in range(opened(data).footer.layout.filter_offset):
        for byte in {0, 1, 2, 3, 4, 255, data[at] ^ 1, data[at] ^ 128, data[at] + 8 & 255}:
            forged = data[:at] + bytes([byte]) + data[at + 1 :]
            sst = opened(resealed(LEVEL_NAME, data, forged), listed_seq)
            right = outcome(partial(decoded, sst))
            assert outcome(partial(rows_in, sst)) == right, (at, byte)
            errors.add(isinstance(right, tuple))
    assert errors == {True, False}
