"""Every flipped bit of every kind of object is found, by the readers that serve (I12).

There is no byte that no checksum covers: padding, reserved fields, and what is kept but not used
yet count too. Each byte of a sample has one bit flipped, all eight places in turn; the error names
the object, a byte in the part that is damaged, and the kind of damage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import pytest

from shalekv.core.audit.finding import FindingKind
from shalekv.core.lease import leased_sst_id
from shalekv.core.sst_table import SstInfo
from shalekv.engine.fsck.check import Fsck
from shalekv.engine.fsck.objects import audit_object
from shalekv.engine.levels.ssts import LevelSsts
from shalekv.errors import BadChecksum, BadMagic, CorruptObject, Truncated
from shalekv.format.block_frame import Codec
from shalekv.format.footer_codec import read_footer
from shalekv.format.manifest import decode_manifest
from shalekv.format.names import level_name, manifest_name, wal_name
from shalekv.format.sst import open_sst
from shalekv.format.sst_encode import encode_sst
from shalekv.format.sst_tail import TAIL_BYTES
from shalekv.settings import CacheSettings
from tests.kit.engine.damage import (
    CURRENT,
    DATABASE_ID,
    LEASE_ID,
    Planted,
    found,
    properties,
    record,
    sst_id,
)
from tests.kit.inline_runtime import gathered
from tests.kit.samples import put, range_tombstone, refusal, tombstone

MANIFEST_MAGIC = range(8)
MANIFEST_LENGTH = range(12, 16)
MAGIC_BYTES = 8
LENGTH_BYTES = 4
LEVEL_ID = sst_id(77)
LEVEL = level_name(LEVEL_ID)

POINTS = [put(b"key %d" % n, 12, b"value " * 9, n % 2 * 99) for n in range(8)] + [
    tombstone(b"q", 12)
]
RANGES = [range_tombstone(b"a", b"k", 11), range_tombstone(b"x", b"", 12)]
RECORDS = [record(b"first", 12), record(b"second", 12)]


def wal(codec: Codec = Codec.NONE) -> bytes:
    """A WAL object with points, range tombstones and records."""
    name = wal_name(6)
    return encode_sst(properties(name, 2), POINTS, RANGES, RECORDS, block_bytes=200, codec=codec)


def level(codec: Codec = Codec.NONE) -> bytes:
    """An SST of the levels, with a filter."""
    return encode_sst(
        properties(LEVEL, 1),
        POINTS,
        RANGES,
        block_bytes=200,
        codec=codec,
        filter_bits_per_key=10,
    )


def system() -> bytes:
    """An SST with records of the system alone."""
    return encode_sst(properties(LEVEL, 1), (), (), RECORDS, block_bytes=40, filter_bits_per_key=10)


def load_record() -> bytes:
    """A WAL object that commits a load."""
    return Planted().data(wal_name(9))


def fence() -> bytes:
    """A WAL object without entries."""
    return encode_sst(properties(wal_name(6), 2), (), block_bytes=1)


SSTS = {
    "WAL": (wal_name(6), wal()),
    "WAL, lz4": (wal_name(6), wal(Codec.LZ4)),
    "WAL, zstd": (wal_name(6), wal(Codec.ZSTD)),
    "WAL, a load": (wal_name(9), load_record()),
    "fence": (wal_name(6), fence()),
    "level": (LEVEL, level()),
    "level, lz4": (LEVEL, level(Codec.LZ4)),
    "level, zstd": (LEVEL, level(Codec.ZSTD)),
    "system": (LEVEL, system()),
}
samples = pytest.mark.parametrize(("name", "data"), SSTS.values(), ids=SSTS)


@dataclass(frozen=True, slots=True)
class Flip:
    """One damaged copy of an object."""

    at: int
    data: bytes


def flips(data: bytes) -> Iterator[Flip]:
    """For each byte a copy in which one bit of it is flipped."""
    for at in range(len(data)):
        copy = bytearray(data)
        copy[at] ^= 1 << at % 8
        yield Flip(at, bytes(copy))


def parts_of(name: str, data: bytes) -> list[range]:
    """What checksums cover one by one: blocks, filter, index, footer."""
    sst = open_sst(name, data, database_id=None)
    layout = sst.footer.layout
    footer_at = layout.index_offset + layout.index_len
    blocks = [range(handle.offset, handle.offset + handle.length) for handle in sst.index]
    return [
        *blocks,
        range(layout.filter_offset, layout.index_offset),
        range(layout.index_offset, footer_at),
        range(footer_at, len(data)),
    ]


def check_error(error: CorruptObject | None, name: str, flip: Flip, parts: list[range]) -> None:
    """The error names the object, and where the part that is damaged begins."""
    size_bytes = len(flip.data)
    assert error is not None, f"byte {flip.at} of {name} is not covered"
    assert error.name == name
    (part,) = [part for part in parts if flip.at in part]
    if flip.at >= size_bytes - MAGIC_BYTES:
        assert (type(error), error.offset) == (BadMagic, size_bytes - MAGIC_BYTES)
    elif size_bytes - TAIL_BYTES <= flip.at < size_bytes - TAIL_BYTES + LENGTH_BYTES:
        # The length of the footer says where it begins.
        assert type(error) in (BadChecksum, Truncated)
        assert 0 <= error.offset < size_bytes
    else:
        assert (type(error), error.offset) == (BadChecksum, part.start)


def test_samples_have_every_part() -> None:
    """Several blocks, a filter, an index, and blocks that are smaller than without a codec."""
    for label, (name, data) in SSTS.items():
        *blocks, key_filter, index, footer = parts_of(name, data)
        assert len(blocks) == 0 if label == "fence" else len(blocks) > 0, label
        assert bool(key_filter) == name.startswith("levels/"), label
        assert index, label
        assert footer, label
    for codec in ("lz4", "zstd"):
        assert len(SSTS[f"level, {codec}"][1]) < len(SSTS["level"][1])
        assert len(SSTS[f"WAL, {codec}"][1]) < len(SSTS["WAL"][1])


@samples
def test_flipped_bits_are_found_by_who_reads_all(name: str, data: bytes) -> None:
    """The replay of the WAL, and compactions, open whole objects."""
    parts = parts_of(name, data)
    for flip in flips(data):
        opened = refusal(partial(open_sst, name, flip.data, database_id=DATABASE_ID))
        check_error(opened, name, flip, parts)


@samples
async def test_flipped_bits_are_found_by_checks(name: str, data: bytes) -> None:
    """The audit of an object tells one finding with object, byte and kind."""
    parts = parts_of(name, data)
    planted = Planted()
    for flip in flips(data):
        planted.write(name, flip.data)
        audited = await audit_object(planted.cas, name, len(data), database_id=DATABASE_ID)
        (finding,) = audited.findings
        error = {FindingKind.BAD_MAGIC: BadMagic, FindingKind.TRUNCATED: Truncated}.get(
            finding.kind, BadChecksum
        )
        assert finding.kind.value.upper() == error.reason
        offset = -1 if finding.offset is None else finding.offset
        check_error(error(finding.name, offset, finding.problem), name, flip, parts)


async def _read_all(planted: Planted, info: SstInfo) -> None:
    """Read an SST as gets and scans do."""
    ssts = LevelSsts(planted.cas, database_id=DATABASE_ID, settings=CacheSettings())
    opened = await ssts.metadata(info)
    for number in range(len(opened.index)):
        await ssts.block(opened, number)


@pytest.mark.parametrize("label", [label for label, (name, _) in SSTS.items() if name == LEVEL])
async def test_flipped_bits_are_found_by_reads_of_the_levels(label: str) -> None:
    """Footer, index and filter by their first reader, a block by whoever fetches it."""
    _, data = SSTS[label]
    info = read_footer(LEVEL, data, len(data), database_id=DATABASE_ID).info(1)
    parts = parts_of(LEVEL, data)
    planted = Planted()
    planted.write(LEVEL, data)
    await _read_all(planted, info)
    for flip in flips(data):
        planted.write(LEVEL, flip.data)
        try:
            await _read_all(planted, info)
        except CorruptObject as error:
            check_error(error, LEVEL, flip, parts)
        else:
            raise AssertionError(f"byte {flip.at} of {label} is not covered")


def test_flipped_bits_of_manifests_are_found() -> None:
    """SST table, snapshots, leases, loads and all else: one checksum covers them."""
    name = manifest_name(CURRENT)
    planted = Planted()
    assert planted.current.leveled_ssts
    assert planted.current.snapshots
    assert planted.current.leases
    assert planted.current.pending_loads
    data = planted.data(name)
    for flip in flips(data):
        error = refusal(partial(decode_manifest, name, flip.data))
        assert error is not None, f"byte {flip.at} is not covered"
        assert error.name == name
        if flip.at in MANIFEST_MAGIC:
            assert (type(error), error.offset) == (BadMagic, 0)
        elif flip.at in MANIFEST_LENGTH:
            assert type(error) is Truncated
        else:
            assert (type(error), error.offset) == (BadChecksum, 0)


async def test_every_object_of_a_database_is_checked() -> None:
    """Damage of any object, at its beginning, in its middle or at its end, is found in it."""
    names = [
        info.name
        for prefix in ("manifest/", "wal/", "levels/")
        for info in Planted().objects.page(prefix, "")
    ]
    leased = level_name(leased_sst_id(LEASE_ID, bytes(8)))  # nothing names it yet
    assert leased in names
    assert len(names) == 2 + 8 + 8
    for name in names:
        size_bytes = len(Planted().data(name))
        for at in (0, size_bytes // 2, size_bytes - 1):
            planted = Planted()
            planted.flip(name, at)
            damaged = {each for each, kind in await found(planted) if kind.is_damage}
            if name == manifest_name(CURRENT):
                assert name in damaged  # an older one says what to look at
            else:
                assert damaged == (set() if name == leased else {name}), (name, at)


async def test_a_swapped_manifest_row_is_found() -> None:
    """A checksum of another SST, under an envelope that is intact, is found by reads and checks."""
    planted = Planted()
    (info,) = [each for each in planted.current.leveled_ssts if each.id == sst_id(1)]
    forged = replace(info, checksum=info.checksum ^ 1)
    planted.replace_sst(1, forged)
    with pytest.raises(CorruptObject):
        await _read_all(planted, forged)
    (finding,) = await gathered(Fsck(planted.cas).findings())
    assert finding.kind is FindingKind.WRONG_OBJECT
