"""Whole SSTs, as the WAL is read and as checks read the levels."""

from __future__ import annotations

from collections.abc import Iterator

from shalekv.core.entry import Entry
from shalekv.format.block import Block
from shalekv.format.block_frame import Codec
from shalekv.format.load_record import load_entry
from shalekv.format.section import Section
from shalekv.format.sst import (
    Sst,
    open_sst,
)
from shalekv.format.sst_encode import encode_fence, encode_sst
from shalekv.format.statistics import statistics, weights
from tests.fuzz.decoders.decoder import Decoder
from tests.fuzz.decoders.forged_ssts import resealed
from tests.kit.samples import (
    LEVEL_NAME,
    WAL_NAME,
    properties,
    put,
    sample,
)
from tests.unit.format.test_load_record import load

LOAD = encode_sst(properties(), (), (), (), [load_entry(load(), 9)], block_bytes=64)
UNNUMBERED = encode_sst(
    properties(LEVEL_NAME), [put(b"a", 0), put(b"b", 0)], block_bytes=16, filter_bits_per_key=10
)
WAL_SSTS = [sample(codec=codec, block_bytes=64) for codec in Codec]
LEVEL_SSTS = [
    sample(LEVEL_NAME, codec=codec, block_bytes=300, filter_bits_per_key=10) for codec in Codec
]


def read_sst(name: str, data: bytes) -> object:
    sst = open_sst(name, data, database_id=None)
    sst.audit()
    return (
        sst.footer,
        [*sst.index],
        [*sst.entries()],
        [*sst.range_tombstones()],
        [*sst.system_entries()],
        [*sst.control_entries()],
        [sst.index.locate(section, b"banana") for section in Section],
        statistics(sst.footer, sst.index),
        [*weights(sst.index, range(len(sst.index)))],
        [*_rows_of_blocks(sst)],
    )


def _rows_of_blocks(sst: Sst) -> Iterator[object]:
    for number in range(len(sst.index)):
        yield from rows(sst.decode_block(number))


def rows(block: Block) -> Iterator[object]:
    """The rows, one by one and together, and what is found by their keys."""
    for row in range(len(block)):
        entry = block.entry(row)
        yield entry
        assert isinstance(block.find(entry.key, entry.seq), Entry | None)
    yield block.lower_bound(b"banana", 3)
    yield block.last_key
    yield block.columns()


DECODERS = (
    Decoder(
        name="SST of the WAL",
        covers=(open_sst,),
        decode=lambda data: read_sst(WAL_NAME, data),
        samples=[*WAL_SSTS, LOAD, encode_fence(properties())],
        reseal=resealed,
        is_compressed=True,
        is_sealed=True,
    ),
    Decoder(
        name="SST of the levels",
        covers=(open_sst,),
        decode=lambda data: read_sst(LEVEL_NAME, data),
        samples=[*LEVEL_SSTS, UNNUMBERED],
        reseal=resealed,
        is_compressed=True,
        is_sealed=True,
    ),
)
