"""What a new golden set is made of: every feature of each format at least once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from google.protobuf.message import Message

from shalekv.core.entry import Entry, Kind
from shalekv.core.manifest import (
    CasMode,
    Lease,
    Manifest,
    Origin,
    PendingLoad,
    RecentLoad,
    Snapshot,
    WalMode,
)
from shalekv.core.sst_table import SstInfo, SstTable
from shalekv.format.block_frame import Codec
from shalekv.format.footer import SstProperties
from shalekv.format.idempotency import IdempotencyRecord, ReplyKind, encode_record, record_key
from shalekv.format.load_record import load_entry
from shalekv.format.names import level_name, wal_name
from shalekv.v1 import kv_pb2

DATABASE_ID = bytes.fromhex("0198c0de0000700080000000000000db")
LEVEL_ID = bytes.fromhex("0198c0de000170008000000000000001")
SYSTEM_LEVEL_ID = bytes.fromhex("0198c0de000470008000000000000004")
ZSTD_LEVEL_ID = bytes.fromhex("0198c0de000570008000000000000005")
FILTER_LEVEL_ID = bytes.fromhex("0198c0de000670008000000000000006")
UNNUMBERED_LEVEL_ID = bytes.fromhex("0198c0de000770008000000000000007")
OTHER_LEVEL_ID = bytes.fromhex("0198c0de000270008000000000000002")
LOADED_ID = bytes.fromhex("0198c0de000370008000000000000003")


@dataclass(frozen=True, slots=True)
class GoldenSst:
    """The arguments that an SST is written with."""

    properties: SstProperties
    entries: tuple[Entry, ...] = ()
    range_tombstones: tuple[Entry, ...] = ()
    system: tuple[Entry, ...] = ()
    control: tuple[Entry, ...] = ()
    block_bytes: int = 4096
    codec: Codec = Codec.NONE
    filter_bits_per_key: float | None = None
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


def _record(
    key: bytes, seq: int, kind: ReplyKind, reply: Message, expire_at_ms: int, wal_id: int = 43
) -> Entry:
    """The idempotency record of a request with this key."""
    request_hash = bytes(range(seq, seq + 16))
    record = IdempotencyRecord(request_hash, wal_id, kind, reply.SerializeToString())
    return Entry(record_key(key), seq, Kind.PUT, encode_record(record), expire_at_ms)


_WINDOW_END_MS = 1_700_086_400_000
_UUID_KEY = bytes.fromhex("018bcfe5680070008000000000000001")
_DURABLE = kv_pb2.DURABILITY_DURABLE
RECORDS = (
    _record(b"\x00", 21, ReplyKind.PUT, kv_pb2.PutReply(durability=_DURABLE), _WINDOW_END_MS),
    _record(_UUID_KEY, 22, ReplyKind.DELETE, kv_pb2.DeleteReply(), _WINDOW_END_MS + 1),
    _record(
        b"k" * 64,
        23,
        ReplyKind.DELETE_RANGE,
        kv_pb2.DeleteRangeReply(durability=_DURABLE),
        2**64 - 1,
    ),
    _record(
        b"once, and again after its window",
        25,
        ReplyKind.WRITE,
        kv_pb2.WriteReply(durability=_DURABLE, counters=(-1, 2**63 - 1)),
        _WINDOW_END_MS + 86_400_000,
    ),
    _record(
        b"once, and again after its window",
        24,
        ReplyKind.TXN,
        kv_pb2.TxnReply(
            succeeded=True,
            results=(
                kv_pb2.TxnResult(get=kv_pb2.GetReply(found=True, value=b"read", seq=20)),
                kv_pb2.TxnResult(counter=-7),
                kv_pb2.TxnResult(),
            ),
            durability=_DURABLE,
        ),
        _WINDOW_END_MS,
    ),
    Entry(record_key(b"removed"), 26, Kind.TOMBSTONE),
)
WAL_SYSTEM = GoldenSst(
    properties(wal_name(43), bytes(range(0xD0, 0xE0))),
    (
        Entry(b"\x01key", 21, Kind.PUT, b"of a client, although it begins like a record's"),
        Entry(b"apple", 23, Kind.TOMBSTONE),
        Entry(b"banana", 25, Kind.PUT, b"\xff" * 8),
    ),
    (Entry(b"c", 24, Kind.RANGE_TOMBSTONE, b"d"),),
    RECORDS,
)
WAL_SYSTEM_ALONE = GoldenSst(
    properties(wal_name(44), bytes(range(0xE0, 0xF0))),
    system=(
        _record(_UUID_KEY, 31, ReplyKind.TXN, kv_pb2.TxnReply(), _WINDOW_END_MS, wal_id=44),
        Entry(record_key(b"removed"), 32, Kind.TOMBSTONE),
    ),
)
LEVEL_SYSTEM = GoldenSst(
    properties(level_name(SYSTEM_LEVEL_ID), bytes(range(0xF0, 0x100))),
    tuple(Entry(b"key%03d" % n, 20, Kind.PUT, b"value %03d" % n) for n in range(9)),
    (),
    RECORDS,
    block_bytes=64,
    filter_bytes=b"any bytes, to 8s",
)


WAL_LZ4 = GoldenSst(
    properties(wal_name(45), bytes(range(0x11, 0x21))),
    (
        *(Entry(b"key%03d" % n, 40, Kind.PUT, b"value %03d" % n * 9) for n in range(30)),
        Entry(b"noise", 40, Kind.PUT, Random(2).randbytes(600)),
        Entry(b"run", 40, Kind.PUT, b"r" * 3_000),
    ),
    (Entry(b"c", 41, Kind.RANGE_TOMBSTONE, b"d"),),
    RECORDS,
    block_bytes=600,
    codec=Codec.LZ4,
)
LEVEL_ZSTD = GoldenSst(
    properties(level_name(ZSTD_LEVEL_ID), bytes(range(0x12, 0x22))),
    (
        *(Entry(b"key%03d" % n, 50, Kind.PUT, b"value %03d" % n * 5, n) for n in range(90)),
        Entry(b"noise", 51, Kind.PUT, Random(1).randbytes(600)),
        *(Entry(b"of many", seq, Kind.TOMBSTONE) for seq in range(99, 50, -1)),
        Entry(b"run", 52, Kind.PUT, b"r" * 3_000),
    ),
    (
        Entry(b"key050", 53, Kind.RANGE_TOMBSTONE, b"key060"),
        Entry(b"key055", 53, Kind.RANGE_TOMBSTONE, b"key200"),
    ),
    RECORDS,
    block_bytes=600,
    codec=Codec.ZSTD,
    filter_bits_per_key=10,
)
LEVEL_FILTER = GoldenSst(
    properties(level_name(FILTER_LEVEL_ID), bytes(range(0x13, 0x23))),
    (
        Entry(b"", 60, Kind.PUT, b"the empty key"),
        *(Entry(b"key%03d" % n, 60, Kind.PUT, b"v") for n in range(300)),
        *(Entry(b"of versions", seq, Kind.TOMBSTONE) for seq in (63, 62, 61)),
        *(Entry(bytes(range(200, 200 + n)), 60, Kind.PUT) for n in range(1, 50)),
    ),
    (Entry(b"x", 64, Kind.RANGE_TOMBSTONE),),
    filter_bits_per_key=4,
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


def _loaded(sst_id: bytes, first_key: bytes, last_key: bytes) -> SstInfo:
    """A file of a load, which knows no sequence number."""
    return replace(_info(sst_id, 0, first_key, last_key), min_seq=0, max_seq=0)


LOAD_FILES = SstTable.from_infos(
    (_loaded(LOADED_ID, b"", b"apple"), _loaded(OTHER_LEVEL_ID, b"apple\x00", b"\xfe" + b"z" * 9))
)
LOAD = PendingLoad("products-8", LOAD_FILES)
LOAD_OF_LONG_ID = PendingLoad(
    "\u00e4" * 127 + "-9", SstTable.from_infos((_loaded(LOADED_ID, b"\xff", b"\xff" * 3),))
)
WAL_LOAD = GoldenSst(
    properties(wal_name(46), bytes(range(0x14, 0x24))), control=(load_entry(LOAD, 70),)
)
WAL_LOAD_SYSTEM = GoldenSst(
    properties(wal_name(47), bytes(range(0x15, 0x25))),
    system=(_record(b"of a batch", 71, ReplyKind.WRITE, kv_pb2.WriteReply(), _WINDOW_END_MS, 47),),
    control=(load_entry(LOAD, 71), load_entry(LOAD_OF_LONG_ID, 72)),
    block_bytes=64,
)
LEVEL_UNNUMBERED = GoldenSst(
    properties(level_name(UNNUMBERED_LEVEL_ID), bytes(range(0x16, 0x26))),
    (
        *(Entry(b"key%03d" % n, 0, Kind.PUT, b"value %03d" % n) for n in range(9)),
        Entry(b"key100", 0, Kind.TOMBSTONE),
        Entry(b"key101", 0, Kind.PUT, b"expires", 1_700_000_060_000),
    ),
    block_bytes=64,
    filter_bits_per_key=10,
)
MANIFEST_LOADS = Manifest(
    database_id=DATABASE_ID,
    manifest_id=43,
    write_id=bytes(range(0x61, 0x71)),
    wal_id_last_compacted=44,
    last_compacted_seq=60,
    pending_loads=(LOAD, LOAD_OF_LONG_ID),
    recent_loads=(
        RecentLoad("products-7", 50, 1_700_000_000_000),
        RecentLoad("the first", 60, 1_700_000_000_700),
    ),
    loads_forgotten_ms=1_699_999_999_000,
)
MANIFEST_SNAPSHOTS = Manifest(
    database_id=DATABASE_ID,
    manifest_id=44,
    write_id=bytes(range(0x62, 0x72)),
    wal_id_last_seen=3,
    snapshots=(
        Snapshot(bytes(range(0x81, 0x91)), 43, 0, "monthly", 0x89ABCDEF, 1_700_000_000_900),
        Snapshot(bytes(range(0x91, 0xA1)), 44, 1_700_000_700, "", 0, 1_700_000_001_000),
    ),
)
MANIFEST_CLONE = Manifest(
    database_id=DATABASE_ID,
    manifest_id=45,
    write_id=bytes(range(0x63, 0x73)),
    wal_id_last_compacted=0,
    wal_id_last_seen=0,
    snapshots=(Snapshot(bytes(range(0x82, 0x92)), 44, 0, "clone of it", 0x89ABCDEF, 0, True),),
    loads_forgotten_ms=1_699_999_999_000,
    origins=(
        Origin(
            bytes(range(0xA2, 0xB2)),
            "s3://bucket/parent",
            bytes(range(0xB2, 0xC2)),
            bytes(range(0x10, 0x30)),
        ),
        Origin(bytes(range(0xC2, 0xD2)), "file:///srv/spent", bytes(range(0xD2, 0xE2)), b""),
        Origin(bytes(range(0xE2, 0xF2)), "", b"", bytes(range(0x30, 0x40))),
    ),
)
MANIFEST_RESERVED = Manifest(
    database_id=DATABASE_ID,
    manifest_id=46,
    write_id=bytes(range(0x64, 0x74)),
    wal_id_last_compacted=44,
    last_compacted_seq=60,
    leases=(
        Lease(bytes(range(0x31, 0x41)), 1_700_000_600, "a job over a range", reserved_seq=60),
        Lease(bytes(range(0x41, 0x51)), 1_700_000_700, "consumer feed", wal_id_min=40),
    ),
)
MANIFEST_QUORUM = Manifest(
    database_id=DATABASE_ID,
    manifest_id=47,
    write_id=bytes(range(0x65, 0x75)),
    writer_epoch=12,
    writer_nonce=bytes(range(0x51, 0x61)),
    wal_mode=WalMode.QUORUM,
    wal_generation=7,
    wal_members=tuple(f"{number:032x}@keeper-{number}.example:7655" for number in (1, 2, 3)),
    wal_members_next=tuple(f"{number:032x}@keeper-{number}.example:7655" for number in (1, 2, 4)),
    wal_id_last_compacted=44,
    wal_id_last_seen=46,
)
