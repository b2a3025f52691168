"""What a new golden set is made of: every feature of each format at least once."""

from __future__ import annotations

from dataclasses import dataclass

from shalekv.core.entry import Entry, Kind
from shalekv.core.manifest import (
    CasMode,
    Lease,
    Manifest,
    PendingLoad,
    RecentLoad,
    Snapshot,
    WalMode,
)
from shalekv.core.sst_table import SstInfo, SstTable
from shalekv.format.footer import SstProperties
from shalekv.format.names import level_name, wal_name

DATABASE_ID = bytes.fromhex("0198c0de0000700080000000000000db")
LEVEL_ID = bytes.fromhex("0198c0de000170008000000000000001")
OTHER_LEVEL_ID = bytes.fromhex("0198c0de000270008000000000000002")
LOADED_ID = bytes.fromhex("0198c0de000370008000000000000003")


@dataclass(frozen=True, slots=True)
class GoldenSst:
    """The arguments that an SST is written with."""

    properties: SstProperties
    entries: tuple[Entry, ...] = ()
    range_tombstones: tuple[Entry, ...] = ()
    block_bytes: int = 4096
    filter_bytes: bytes = b""


def properties(name: str, write_id: bytes) -> SstProperties:
    """The properties of an object of the golden database."""
    return SstProperties(
        name=name,
        database_id=DATABASE_ID,
        writer_epoch=3,
        writer_nonce=bytes(range(0x20, 0x30)),
        write_id=write_id,
        logical_time_ms=1_700_000_000_000,
    )


WAL_ENTRIES = GoldenSst(
    properties(wal_name(41), bytes(range(0x30, 0x40))),
    (
        Entry(b"", 1004, Kind.PUT, b"the empty key"),
        Entry(b"apple", 1009, Kind.PUT, b"newest of three versions"),
        Entry(b"apple", 1005, Kind.TOMBSTONE),
        Entry(b"apple", 1001, Kind.PUT, b"oldest of three versions"),
        Entry(b"banana", 1002, Kind.PUT, b"expires", 1_700_000_060_000),
        Entry(b"cherry", 1003, Kind.TOMBSTONE),
        Entry(b"empty", 1003, Kind.PUT),
        Entry(b"z\x00\x7f\x80\xff", 1008, Kind.PUT, bytes(range(256))),
    ),
    (
        Entry(b"b", 1006, Kind.RANGE_TOMBSTONE, b"d"),
        Entry(b"x", 1007, Kind.RANGE_TOMBSTONE),
    ),
)
WAL_FENCE = GoldenSst(properties(wal_name(2**64 - 1), bytes(range(0x40, 0x50))))
LEVEL_BLOCKS = GoldenSst(
    properties(level_name(LEVEL_ID), bytes(range(0x50, 0x60))),
    (
        *(Entry(b"key%03d" % n, 500, Kind.PUT, b"value %03d" % n) for n in range(9)),
        Entry(b"key100", 507, Kind.PUT, b"the first of many"),
        *(Entry(b"key100", seq, Kind.TOMBSTONE) for seq in range(506, 500, -1)),
        Entry(b"key101", 2**64 - 1, Kind.PUT, b"far away", 2**64 - 1),
        Entry(b"key102", 1, Kind.TOMBSTONE),
    ),
    (
        Entry(b"key050", 510, Kind.RANGE_TOMBSTONE, b"key060"),
        Entry(b"key055", 512, Kind.RANGE_TOMBSTONE, b"key200"),
        Entry(b"key055", 511, Kind.RANGE_TOMBSTONE, b"key300"),
    ),
    block_bytes=64,
    filter_bytes=b"any bytes, to 8s",
)


def _info(sst_id: bytes, level: int, first_key: bytes, last_key: bytes) -> SstInfo:
    return SstInfo(
        id=sst_id,
        level=level,
        first_key=first_key,
        last_key=last_key,
        filter_offset=2_000_000,
        filter_len=12_504,
        block_meta_offset=2_012_504,
        block_meta_len=20_480,
        min_seq=17,
        max_seq=512,
        entry_count=10_003,
        tombstone_count=501,
        size_bytes=2_033_216,
        checksum=0x89ABCDEF,
    )


MANIFEST_FULL = Manifest(
    database_id=DATABASE_ID,
    manifest_id=42,
    write_id=bytes(range(0x60, 0x70)),
    cas_mode=CasMode.TWO_PHASE,
    wal_mode=WalMode.QUORUM,
    wal_generation=5,
    wal_members=("keeper-a.example:7655", "keeper-b.example:7655", "keeper-c.example:7655"),
    writer_epoch=3,
    writer_nonce=bytes(range(0x20, 0x30)),
    writer_address="writer.example:7654",
    writer_first_seq=901,
    compactor_epoch=2,
    compactor_nonce=bytes(range(0x70, 0x80)),
    wal_id_last_compacted=11,
    wal_id_last_seen=41,
    last_compacted_seq=512,
    max_parallel_writes=4,
    fence_width=8,
    gc_cutoff_ms=1_700_000_000_000,
    logical_time_ms=1_700_000_000_500,
    leveled_ssts=SstTable.from_infos(
        (_info(LEVEL_ID, 0, b"", b""), _info(OTHER_LEVEL_ID, 6, b"\x00\xff", b"key999"))
    ),
    snapshots=(
        Snapshot(bytes(range(0x80, 0x90)), 40, 1_700_000_600, "nightly", 0x01234567),
        Snapshot(bytes(range(0x90, 0xA0)), 42, 0),
    ),
    leases=(
        Lease(bytes(range(0xA0, 0xB0)), 1_700_000_900, "bulk load of products", 12),
        Lease(bytes(range(0xB0, 0xC0)), 0, "change feed"),
    ),
    pending_loads=(
        PendingLoad("products/7", SstTable.from_infos((_info(LOADED_ID, 0, b"p", b"q"),))),
    ),
    recent_loads=(RecentLoad("products/5", 300), RecentLoad("products/6", 400)),
)
