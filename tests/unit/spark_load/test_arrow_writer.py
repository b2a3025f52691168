"""Blocks that are encoded from Arrow: the bytes of the format, to the last one."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from random import Random

import pytest

from shalekv.format.block_frame import Codec
from shalekv.format.columns import Columns
from shalekv.format.section import Section
from shalekv.format.sst_writer import EncodedBlock, FinishedSst, SstWriter
from shalekv_spark.loading.block_encoder import BlockEncoder
from shalekv_spark.loading.rows import PointRows
from tests.kit.samples import LEVEL_NAME, properties
from tests.unit.spark_load.ground import Row, batches_of, taken

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def writer(codec: Codec, block_bytes: int, filter_bits: int | None) -> SstWriter:
    own = properties(LEVEL_NAME)
    return SstWriter(own, block_bytes=block_bytes, codec=codec, filter_bits_per_key=filter_bits)


def by_rows(sst: SstWriter, parts: list[PointRows]) -> FinishedSst:
    """The SST as the server's own code writes it, all rows at once."""
    keys = [key for part in parts for key in part.keys.to_pylist()]
    values = [value for part in parts for value in part.values.to_pylist()]
    kinds: list[int] = []
    times: list[int] = []
    for part in parts:
        count = len(part.keys)
        kinds += [1] * count if part.kinds is None else part.kinds.tolist()
        times += [0] * count if part.expire_at_ms is None else part.expire_at_ms.tolist()
    sst.add(Section.POINTS, Columns(keys, [0] * len(keys), bytes(kinds), values, times))
    return sst.finish()


def random_rows(random: Random) -> Iterator[Row]:
    """Rows by key; some stretches have deletes or expiries, others have none."""
    for number in range(random.randint(1, 300)):
        mixed = number // 50 % 2
        yield Row(
            b"%06d" % number + b"k" * random.randint(0, 2),
            random.randbytes(random.choice((0, 3, 16))),
            "delete" if mixed and random.random() < 0.2 else "put",
            EPOCH + timedelta(milliseconds=random.randint(1, 10**12))
            if mixed and random.random() < 0.5
            else None,
        )


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.LZ4, Codec.ZSTD])
def test_the_bytes_are_those_of_the_servers_code(codec: Codec) -> None:
    """Whatever the rows are, the sizes of blocks, and where batches end."""
    for seed in range(60):
        random = Random(seed)
        rows = [*random_rows(random)]
        sizes = [random.randint(1, 80) for _ in range(random.randint(0, 6))]
        parts = taken(batches_of(rows, sizes))
        block_bytes = random.choice((1, 40, 300, 100_000))
        filter_bits = random.choice((None, 10))
        sst = writer(codec, block_bytes, filter_bits)
        encoder = BlockEncoder(
            block_bytes=block_bytes, codec=codec, has_filter=filter_bits is not None
        )
        for part in parts:
            for block in encoder.add(part):
                sst.add_block(block)
        for block in encoder.finish():
            sst.add_block(block)
        expected = writer(codec, block_bytes, filter_bits)
        assert sst.finish() == by_rows(expected, parts), f"seed {seed}"
        assert sst.first_expiry_ms == expected.first_expiry_ms, f"seed {seed}"


def test_a_block_does_not_go_below_what_stands() -> None:
    """Nor is it taken where rows were added, or another section has begun."""
    parts = taken(batches_of([Row(b"a"), Row(b"b")], []))
    (block,) = encoded(parts)
    sst = writer(Codec.NONE, 100, None)
    sst.add_block(block)
    with pytest.raises(ValueError, match="not above the key before it"):
        sst.add_block(block)
    sst = writer(Codec.NONE, 100, None)
    sst.add(Section.POINTS, Columns([b"A"], [0], b"\x01", [b""], [0]))
    with pytest.raises(ValueError, match="cannot follow rows"):
        sst.add_block(block)


def encoded(parts: list[PointRows]) -> list[EncodedBlock]:
    encoder = BlockEncoder(block_bytes=100, codec=Codec.NONE, has_filter=False)
    blocks = [block for part in parts for block in encoder.add(part)]
    return [*blocks, *encoder.finish()]
