"""Manifests, SSTs of the levels, loads and backups, for the tests of their formats."""

from __future__ import annotations

from hypothesis import strategies as st

from shalekv.format.backup import Backup, LevelCopy, WalCopy
from shalekv.format.manifest import encode_manifest
from shalekv.format.names import manifest_name
from shalekv.protocol.manifest import (
    CasMode,
    Lease,
    Manifest,
    Origin,
    PendingLoad,
    RecentLoad,
    Snapshot,
    WalMode,
)
from shalekv.protocol.sst_table import SstInfo, SstTable

MANIFEST_ID = 42
NAME = manifest_name(MANIFEST_ID)

u32s = st.integers(0, 2**32 - 1)
u64s = st.integers(0, 2**64 - 1)
ids = st.binary(min_size=16, max_size=16)


def some_info(number: int) -> SstInfo:
    """An SST whose fields all differ from each other and from those of other numbers."""
    return SstInfo(
        id=bytes(15) + bytes([number]),
        level=number,
        first_key=b"key%02d" % number,
        last_key=b"key%02d~" % number,
        filter_offset=1000 + number,
        filter_len=2000 + number,
        block_meta_offset=3000 + number,
        block_meta_len=4000 + number,
        min_seq=5000 + number,
        max_seq=6000 + number,
        entry_count=7000 + number,
        tombstone_count=8000 + number,
        size_bytes=9000 + number,
        checksum=0xC0FFEE00 + number,
        first_expiry_ms=10_000 + number,
    )


infos = st.lists(
    st.builds(
        SstInfo,
        ids,
        st.integers(0, 255),
        st.binary(max_size=9),
        st.binary(max_size=9),
        u64s,
        u64s,
        u64s,
        u64s,
        u64s,
        u64s,
        u64s,
        u64s,
        u64s,
        u32s,
        u64s,
    ),
    max_size=6,
    unique_by=lambda info: info.id,
)
tables = infos.map(SstTable.from_infos)
packed_ids = st.lists(ids, max_size=4).map(b"".join)
origins = st.builds(Origin, ids, st.text(min_size=1, max_size=9), ids, packed_ids) | st.builds(
    Origin, ids, st.just(""), st.just(b""), packed_ids
)
manifests = st.builds(
    Manifest,
    database_id=ids,
    manifest_id=st.just(MANIFEST_ID),
    write_id=ids,
    cas_mode=st.sampled_from(CasMode),
    wal_mode=st.sampled_from(WalMode),
    wal_generation=u64s,
    wal_members=st.lists(st.text(max_size=9), max_size=3).map(tuple),
    wal_ids_left_out=st.lists(
        st.tuples(u64s, u64s).map(lambda ends: range(min(ends), max(ends) + 1)), max_size=2
    ).map(tuple),
    writer_epoch=u64s,
    writer_nonce=ids,
    writer_address=st.text(max_size=9),
    writer_first_seq=u64s,
    compactor_epoch=u64s,
    compactor_nonce=ids,
    wal_id_last_compacted=st.none() | u64s,
    wal_id_last_seen=st.none() | u64s,
    last_compacted_seq=u64s,
    max_parallel_writes=u32s,
    fence_width=u32s,
    gc_cutoff_ms=u64s,
    logical_time_ms=u64s,
    time_reset_wal_id=st.none() | u64s,
    leveled_ssts=tables,
    snapshots=st.lists(
        st.builds(Snapshot, ids, u64s, u64s, st.text(max_size=9), u32s, u64s, st.booleans())
    ).map(tuple),
    leases=st.lists(
        st.builds(Lease, ids, u64s, st.text(max_size=9), st.none() | u64s, st.none() | u64s)
    ).map(tuple),
    pending_loads=st.lists(st.builds(PendingLoad, st.text(max_size=9), tables), max_size=3).map(
        tuple
    ),
    recent_loads=st.lists(st.builds(RecentLoad, st.text(max_size=9), u64s, u64s)).map(tuple),
    loads_forgotten_ms=u64s,
    origins=st.lists(origins, max_size=3).map(tuple),
    is_dropped=st.booleans(),
)

FULL = Manifest(
    database_id=bytes(range(16)),
    manifest_id=MANIFEST_ID,
    write_id=b"identifies bytes",
    cas_mode=CasMode.TWO_PHASE,
    wal_mode=WalMode.QUORUM,
    wal_generation=5,
    wal_members=("keeper-a:7655", "keeper-b:7655"),
    wal_members_next=("keeper-b:7655", "keeper-c:7655"),
    wal_ids_left_out=(range(3, 5), range(7, 11)),
    writer_epoch=3,
    writer_nonce=b"nonce of writer!",
    writer_address="writer.example:7654",
    writer_first_seq=8001,
    compactor_epoch=2,
    compactor_nonce=b"compactor nonce!",
    wal_id_last_compacted=11,
    wal_id_last_seen=17,
    last_compacted_seq=9001,
    max_parallel_writes=4,
    fence_width=8,
    gc_cutoff_ms=1_700_000_000_000,
    logical_time_ms=1_700_000_000_500,
    time_reset_wal_id=10,
    leveled_ssts=SstTable.from_infos(map(some_info, (1, 2, 3))),
    snapshots=(
        Snapshot(
            id=b"snapshot number1",
            manifest_id=40,
            snapshot_expire_time_s=1_700_000_600,
            name="nightly",
            manifest_checksum=0xDEADBEEF,
            created_ms=1_700_000_000_200,
            ssts_only=True,
        ),
        Snapshot(b"snapshot number2", 41, 0),
    ),
    leases=(
        Lease(b"lease number one", 1_700_000_900, "bulk load of products", 12, 60),
        Lease(b"lease number two", 0, "change feed"),
    ),
    pending_loads=(PendingLoad("load-7", SstTable.from_infos([some_info(9)])),),
    recent_loads=(RecentLoad("load-5", 8000, 1_700_000_000_100), RecentLoad("load-6", 8500)),
    is_dropped=True,
    loads_forgotten_ms=1_700_000_000_050,
    origins=(
        Origin(b"another database", "s3://bucket/parent", b"the pin in there", bytes(range(32))),
        Origin(b"one of long ago!", "", b"", bytes(range(32, 48))),
    ),
)


def info(
    number: int,
    first_key: bytes = b"a",
    last_key: bytes = b"z",
    *,
    level: int = 0,
    min_seq: int = 0,
    max_seq: int = 0,
    entry_count: int = 10,
) -> SstInfo:
    return SstInfo(
        id=bytes.fromhex(f"0198c0de0000700080000000000000{number:02x}"),
        level=level,
        first_key=first_key,
        last_key=last_key,
        filter_offset=800,
        filter_len=80,
        block_meta_offset=880,
        block_meta_len=120,
        min_seq=min_seq,
        max_seq=max_seq,
        entry_count=entry_count,
        tombstone_count=2,
        size_bytes=1_228,
        checksum=0x01020304,
    )


def load(*infos: SstInfo, load_id: str = "load-1") -> PendingLoad:
    return PendingLoad(load_id, SstTable.from_infos(infos or [info(0)]))


MANIFEST = Manifest(database_id=bytes(range(16)), manifest_id=7, write_id=bytes(16))
BACKUP = Backup(
    backup_id="20260131T040000123Z-1f2e3d4c",
    source_url="s3://bucket/folder",
    seq=2**63,
    logical_time_ms=1_700_000_000_000,
    manifest=MANIFEST,
    manifest_bytes=encode_manifest(MANIFEST),
    copies=(
        (WalCopy(3, b"identifies bytes", 0xFFFFFFFF), 12),
        (LevelCopy(bytes.fromhex("0198c0de000070008000000000000001"), 0), 2**40),
    ),
)
