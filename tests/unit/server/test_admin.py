"""The status of a writer, the statistics of its requests, and loads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import shalekv_client
from shalekv.clock import LoopClock
from shalekv.errors import InvalidRequest
from shalekv.format.footer import SstProperties, read_footer
from shalekv.format.names import level_name, manifest_name
from shalekv.format.sst_message import info_message
from shalekv.format.sst_writer import encode_sst
from shalekv.protocol.entry import Entry, Kind
from shalekv.protocol.manifest import Manifest
from shalekv.protocol.snapshot import create_snapshot
from shalekv.protocol.sst_table import SstInfo, SstTable
from shalekv.read import lookup
from shalekv.server.service import Call
from shalekv.server.status import LevelsReport, ProcessUse, StorePlace, fill_reads
from shalekv.server.writer_service import Ingests, file_infos
from shalekv.settings import CompactorSettings, StoreSettings, WriterSettings
from shalekv.store.api import RequestKind
from shalekv.store.cas import CasStore
from shalekv.telemetry.prices import KINDS
from shalekv.v1 import admin_pb2, kv_pb2
from shalekv.version import VERSION
from shalekv.write.engine import WriterEngine
from shalekv.write.opening import open_log
from shalekv.write.snapshots import SnapshotUsage
from tests.kit.disks.cache_folders import open_cache
from tests.kit.engine.damage import sst_id
from tests.kit.engine.databases import Database
from tests.kit.engine.levels import Levels
from tests.kit.engine.loading import file_of, loading
from tests.kit.manifests import info
from tests.kit.samples import put, tombstone
from tests.kit.serving.roles import CALL, MEMORY, Serving, serving


def status_of(writer: Serving) -> admin_pb2.StatusReply:
    answer = writer.admin.status(admin_pb2.StatusRequest(), CALL)
    assert isinstance(answer, admin_pb2.StatusReply)
    return answer


async def test_status_shows_what_was_written() -> None:
    """Counters, sizes and the header of a status follow what has landed and what has not."""
    async with serving(max_parallel_writes=2) as writer:
        await writer.put(b"a")
        await writer.put(b"a")
        writer.store.is_holding = True
        await writer.put(b"b", durability=MEMORY)
        await writer.store.arrived(1)
        reply = status_of(writer)
        assert reply.version == VERSION
        assert (reply.url, reply.writer.open_ms) == ("memory://held", 12)
        assert reply.header.role == kv_pb2.ROLE_WRITER
        assert (reply.header.epoch, reply.header.seq, reply.header.wal_id) == (1, 2, 3)
        found = reply.writer
        assert (found.durable_prefix_seq, found.next_wal_id) == (2, 5)
        assert (found.wal_objects_in_flight, found.max_parallel_writes) == (1, 2)
        assert (found.wal_objects_written, found.commits) == (2, 2)
        assert found.wal_objects_replayed == 0
        assert 0 < found.queued_bytes < found.queued_bytes_max
        assert (reply.memtable.keys, reply.memtable.runs) == (1, 2)
        assert reply.memtable.bytes > 0
        assert reply.memtable.bytes_max == WriterSettings().memtable_bytes_max
        assert (reply.manifest.manifest_id, reply.manifest.snapshots) == (2, 1)


async def test_stats_have_what_was_sent() -> None:
    """The reply has the requests of each process by kind, with the header of the writer."""
    async with serving() as writer:
        commit = await writer.put(b"a")
        clock = LoopClock()
        sent = {RequestKind.WRITE: 3, RequestKind.RECORD_READ: 2, RequestKind.LIST: 0}
        began_ms = clock.monotonic_ms() - 5_000
        writer.admin.store_use.measure(lambda: [ProcessUse("writer", began_ms, sent)])
        writer.admin.store_use.measure(lambda: [ProcessUse("compactor", began_ms + 9_999, {})])
        reply = writer.admin.stats(admin_pb2.StatsRequest(), CALL)
        assert isinstance(reply, admin_pb2.StatsReply)
        assert (reply.header.role, reply.header.seq) == (kv_pb2.ROLE_WRITER, commit.header.seq)
        assert (reply.url, reply.endpoint, reply.records) == ("memory://held", "", "")
        own, compactor = reply.processes
        assert (own.role, compactor.role, compactor.uptime_ms) == ("writer", "compactor", 0)
        assert own.uptime_ms >= 5_000
        assert {each.kind: each.requests for each in own.requests} == {
            admin_pb2.REQUEST_KIND_WRITE: 3,
            admin_pb2.REQUEST_KIND_RECORD_READ: 2,
        }


def test_every_kind_has_a_message() -> None:
    """The wire, the client and the prices have the same kinds of requests."""
    kinds = [kind.name for kind in RequestKind]
    assert [f"REQUEST_KIND_{name}" for name in kinds] == list(admin_pb2.RequestKind.keys())[1:]
    assert {kind.name: kind.value for kind in shalekv_client.RequestKind} == {
        name.removeprefix("REQUEST_KIND_"): number
        for name, number in list(admin_pb2.RequestKind.items())[1:]
    }
    assert [*KINDS] == [kind.value for kind in RequestKind]
    assert [name.lower() for name in kinds] == [kind.value for kind in RequestKind]


def test_no_secret_is_shown() -> None:
    """An endpoint is shown as its host alone, and the URL of records as its scheme alone."""
    settings = StoreSettings(
        endpoint_url="https://me:pass-word@there:9000/path",
        records_url="mysql://me:pass[word@there/database",
    )
    place = StorePlace.of("s3://bucket", settings)
    assert place == StorePlace("s3://bucket", endpoint="there:9000", records="mysql")
    assert StorePlace.of("s3://bucket", StoreSettings()) == StorePlace("s3://bucket")


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
    cas = CasStore(database.another_store(), database.runtime(), StoreSettings())
    opened = await open_log(cas, WriterSettings(), address="here:1")
    settings = WriterSettings.model_validate({"flush_interval_ms": 0})
    engine = WriterEngine(opened, settings, LoopClock())
    pins = SnapshotUsage(cas)
    return LevelsReport(engine, CompactorSettings(), pins, cas.counts), engine


async def status(report: LevelsReport) -> admin_pb2.StatusReply:
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


async def test_what_a_snapshot_pins_is_not_known_without_its_manifest() -> None:
    """A snapshot whose manifest cannot be read is listed, without the bytes that it pins."""
    database, _ = await filled()
    report, _ = await report_of(database)
    await database.remove(manifest_name(1))
    (kept,) = [each for each in (await status(report)).snapshots if each.snapshot.name == "kept"]
    assert not kept.HasField("pinned_bytes")


async def test_levels_and_amplification_are_reported() -> None:
    """A status has sizes by level, the amplification, and the compaction debt."""
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
    fences = (engine.watermark.wal_id or 0) - 0
    assert found.compaction.wal_objects == fences > 0
    assert found.compaction.uncompacted_bytes == engine.memory_bytes


async def test_snapshots_report_what_they_pin() -> None:
    """A snapshot shows bytes that it pins, and pins alone; each manifest is read once."""
    database, (old, *_) = await filled()
    report, _ = await report_of(database)
    named = {each.snapshot.name: each for each in (await status(report)).snapshots}
    assert named["kept"].pinned_bytes == named["kept"].pinned_alone_bytes == old.size_bytes
    first = _requests(await status(report), "get", "manifest")
    assert _requests(await status(report), "get", "manifest") == first


async def test_reads_and_requests_are_counted() -> None:
    """First reads count as misses, repeated ones as hits; filters that spare a block count."""
    database, _ = await filled()
    report, engine = await report_of(database)
    held = engine.levels.current
    assert await lookup.find(held.ssts, held.version, b"c") is not None
    before = await status(report)
    assert (before.reads.blocks.misses, before.reads.metadata.misses) == (1, 3)
    assert before.reads.filter_negatives == 2
    assert before.reads.blocks.bytes_max == held.ssts.settings.block_cache_bytes
    assert _requests(before, "get_range", "levels") == 4
    assert await lookup.find(held.ssts, held.version, b"c") is not None
    after = await status(report)
    assert (after.reads.blocks.hits, after.reads.blocks.misses) == (1, 1)
    assert _requests(after, "get_range", "levels") == 4


async def test_the_cache_on_disk_is_reported(tmp_path: Path) -> None:
    """A status has hits, misses and size of the cache on disk, if there is one."""
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
    (count,) = [
        each.requests
        for each in reply.store_requests
        if (each.operation, each.folder) == (operation, folder)
    ]
    return count


GOOD = [info(0, b"a", b"b"), info(1, b"c", b"d")]


def request(*infos: SstInfo, load_id: str = "x", key: bytes = b"") -> admin_pb2.IngestSstRequest:
    return admin_pb2.IngestSstRequest(
        header=kv_pb2.RequestHeader(idempotency_key=key),
        load_id=load_id,
        ssts=map(info_message, infos),
    )


def header(seq: int, wal_id: int | None) -> kv_pb2.ReplyHeader:
    return kv_pb2.ReplyHeader(seq=seq, wal_id=wal_id)


async def test_a_load_is_committed_once() -> None:
    """The reply has number and object of the load; a repeat says that it was applied before."""
    database = await Database.created()
    sst = await file_of(database, 1, [Entry(b"a", 0, Kind.PUT, b"1")])
    async with loading(database) as writer:
        ingests = Ingests(writer.loads, header)
        first = await ingests.ingest_sst(request(sst), Call())
        again = await ingests.ingest_sst(request(sst), Call())
    [(load, _)] = writer.landed
    assert (first.header.seq, first.header.wal_id) == (load.seq, load.wal_id)
    assert not first.already_applied
    assert again.already_applied
    assert again.header.seq == load.seq
    assert not again.header.HasField("wal_id")


@pytest.mark.parametrize(
    ("sent", "field"),
    [
        (request(*GOOD, load_id=""), "load_id"),
        (request(*GOOD, load_id="\u00e4" * 129), "load_id"),
        (request(*GOOD, load_id="shalekv:batch:1"), "load_id"),
        (request(*GOOD, key=b"k"), "header.idempotency_key"),
        (request(), "ssts"),
        (request(GOOD[1], GOOD[0]), "ssts[1]"),
        (request(GOOD[0], GOOD[0]), "ssts[1]"),
        (request(GOOD[0], replace(GOOD[1], first_key=b"b")), "ssts[1]"),
        (request(replace(GOOD[0], level=1)), "ssts[0]"),
        (request(replace(GOOD[0], level=99)), "ssts[0]"),
        (request(replace(GOOD[0], min_seq=1, max_seq=1)), "ssts[0]"),
        (request(replace(GOOD[0], size_bytes=0)), "ssts[0]"),
        (request(GOOD[0], replace(GOOD[1], id=b"short")), "ssts[1].id"),
        (request(GOOD[0], replace(GOOD[1], id=bytes(16))), "ssts[1].id"),
    ],
)
async def test_requests_are_checked(sent: admin_pb2.IngestSstRequest, field: str) -> None:
    """An invalid load is refused before any request to the store."""
    database = await Database.created()
    async with loading(database) as writer:
        with pytest.raises(InvalidRequest) as caught:
            await Ingests(writer.loads, header).ingest_sst(sent, Call())
        assert caught.value.field == field
        assert writer.store.asked("create") == []


@pytest.mark.parametrize("version", [0, 2])
def test_versions_of_a_listing_are_checked(version: int) -> None:
    """A listing of an unknown version is refused."""
    message = info_message(GOOD[0])
    message.sstinfo_format_version = version
    with pytest.raises(InvalidRequest, match=r"ssts\[0\].*version"):
        file_infos([message])
