"""What the status tells of levels, caches, requests and snapshots."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from shalekv.clock import LoopClock
from shalekv.core.manifest import Manifest
from shalekv.core.snapshot import create_snapshot
from shalekv.core.sst_table import SstInfo, SstTable
from shalekv.engine.levels import lookup
from shalekv.engine.snapshot_pins import SnapshotPins
from shalekv.engine.writer_engine import WriterEngine
from shalekv.format.footer import SstProperties
from shalekv.format.footer_codec import read_footer
from shalekv.format.names import level_name
from shalekv.format.sst_encode import encode_sst
from shalekv.roles.levels_status import LevelsReport, fill_reads
from shalekv.settings import CompactorSettings, StoreSettings, WriterSettings
from shalekv.store.cas import CasStore
from shalekv.store.counting import CountingStore
from shalekv.v1 import admin_pb2
from tests.kit.disks.cache_folders import open_cache
from tests.kit.engine.databases import Database
from tests.kit.engine.trees import Levels
from tests.kit.samples import put, tombstone


def sst_id(number: int) -> bytes:
    """The id of an SST."""
    return bytes.fromhex("0198c0de000070008000") + number.to_bytes(6, "big")


async def add_sst(database: Database, number: int, level: int, *keys: bytes) -> SstInfo:
    """Write an SST with these keys, the last of which is deleted."""
    *rest, last = keys
    name = level_name(sst_id(number))
    properties = SstProperties(
        name=name,
        database_id=(await database.manifest()).database_id,
        writer_epoch=1,
        writer_nonce=bytes(16),
        write_id=bytes(16),
    )
    entries = [*(put(key, number, b"value") for key in rest), tombstone(last, number)]
    data = encode_sst(properties, entries, block_bytes=64, filter_bits_per_key=10)
    await database.store.create(name, data)
    return replace(read_footer(name, data, len(data), database_id=None).info(level), level=level)


async def report_of(database: Database) -> tuple[LevelsReport, WriterEngine]:
    """A report on an engine that has opened the database."""
    counting = CountingStore(database.another_store())
    opened = await database.open(counting)
    settings = WriterSettings.model_validate({"flush_interval_ms": 0})
    engine = WriterEngine(opened, settings, LoopClock())
    pins = SnapshotPins(CasStore(counting, database.runtime(), StoreSettings()))
    return LevelsReport(engine, CompactorSettings(), pins, counting.counts_by_folder), engine


async def status(report: LevelsReport) -> admin_pb2.StatusReply:
    """A status with what the report fills in."""
    reply = admin_pb2.StatusReply()
    await report.fill(reply)
    return reply


async def filled() -> tuple[Database, list[SstInfo]]:
    """A database with two SSTs in L0 and a run; an older snapshot pins one that was replaced."""
    database = await Database.created()
    old = await add_sst(database, 1, 1, b"a", b"b")
    table = SstTable.from_infos([old])

    def older(manifest: Manifest) -> Manifest:
        made = replace(manifest, leveled_ssts=table, wal_id_last_compacted=0, last_compacted_seq=9)
        return create_snapshot(made, b"s" * 16, expire_time_s=0, name="kept")

    await database.edit(older)
    ssts = [
        await add_sst(database, 2, 1, b"a", b"c"),
        await add_sst(database, 3, 0, b"b", b"d"),
        await add_sst(database, 4, 0, b"b", b"e"),
    ]
    await database.edit(lambda m: replace(m, leveled_ssts=SstTable.from_infos(ssts)))
    return database, [old, *ssts]


async def test_levels_and_amplification_are_told() -> None:
    """Sizes by level, what they amplify, and the debt."""
    database, (_, run, *l0) = await filled()
    report, engine = await report_of(database)
    found = await status(report)
    assert [(each.level, each.ssts, each.entries) for each in found.levels.levels] == [
        (0, 2, 4),
        (1, 1, 2),
    ]
    total = sum(info.size_bytes for info in (run, *l0))
    assert found.levels.bytes == total
    assert found.levels.space_amplification == total / run.size_bytes
    assert found.levels.read_amplification == 3
    fences = (engine.prefix.wal_id or 0) - 0
    assert found.compaction.wal_objects == fences > 0
    assert found.compaction.uncompacted_bytes == engine.memory_bytes


async def test_snapshots_tell_what_they_pin() -> None:
    """What was replaced since, and that nothing else keeps it; each manifest is read once."""
    database, (old, *_) = await filled()
    report, _ = await report_of(database)
    named = {each.snapshot.name: each for each in (await status(report)).snapshots}
    assert named["kept"].pinned_bytes == named["kept"].pinned_alone_bytes == old.size_bytes
    first = _requests(await status(report), "get", "manifest")
    assert _requests(await status(report), "get", "manifest") == first


async def test_reads_and_requests_are_counted() -> None:
    """Misses and requests first, hits when it is read again; filters that spare a block."""
    database, _ = await filled()
    report, engine = await report_of(database)
    held = engine.levels.current
    assert await lookup.find(held.ssts, held.tree, b"c") is not None
    before = await status(report)
    assert (before.reads.blocks.misses, before.reads.metadata.misses) == (1, 3)
    assert before.reads.filter_negatives == 2
    assert before.reads.blocks.bytes_max == held.ssts.settings.block_cache_bytes
    assert _requests(before, "get_range", "levels") == 4
    assert await lookup.find(held.ssts, held.tree, b"c") is not None
    after = await status(report)
    assert (after.reads.blocks.hits, after.reads.blocks.misses) == (1, 1)
    assert _requests(after, "get_range", "levels") == 4


async def test_the_cache_on_disk_is_told_if_there_is_one(tmp_path: Path) -> None:
    """Hits, misses, and what it holds; without one nothing is told."""
    levels = Levels()
    info = levels.add(1, [put(b"a", 1, b"value")])
    disk = open_cache(tmp_path)
    for _ in range(2):
        await levels.open(disk).metadata(info)
        await disk.flush()
    found, none = admin_pb2.ReadStatus(), admin_pb2.ReadStatus()
    fill_reads(found, levels.open(disk))
    fill_reads(none, levels.open())
    assert (found.disk.hits, found.disk.misses) == (2, 2)  # the filter, and the rest
    assert (found.disk.bytes, found.disk.bytes_max) == (2 * 4_096, disk.bytes_max)
    assert not none.HasField("disk")


def _requests(reply: admin_pb2.StatusReply, operation: str, folder: str) -> int:
    """How many there were."""
    (count,) = [
        each.requests
        for each in reply.store_requests
        if (each.operation, each.folder) == (operation, folder)
    ]
    return count
