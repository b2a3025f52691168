"""A load is committed whole or not at all, once, and its files stay as long as they are needed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import pytest

from shalekv.core.entry import Entry, Kind
from shalekv.core.fencing import WriterId
from shalekv.core.loads import OWN_PREFIX, drop_unrecorded, is_pending, level_rows, with_committed
from shalekv.core.manifest import Manifest, PendingLoad
from shalekv.core.snapshot import has_snapshot
from shalekv.core.sst_table import SstInfo
from shalekv.core.transaction import Change
from shalekv.engine.batch_files import Authorship, encode_batch
from shalekv.engine.loads import Loaded
from shalekv.errors import InvalidRequest, LeaseLost, LoadUnknown
from shalekv.format.sst import open_sst
from tests.kit.engine.databases import Database
from tests.kit.engine.loading import (
    SETTINGS,
    Died,
    MortalStore,
    entries_of,
    file_of,
    loading,
    loads_in_wal,
    one_turn,
)
from tests.kit.engine.running_log import quiesce

NOISE = Random(5)
# More than two files of 64 KiB.
BATCH = [
    *(Change(b"key%04d" % n, Kind.PUT, NOISE.randbytes(900), n % 2) for n in range(150, 0, -1)),
    Change(b"gone", Kind.TOMBSTONE),
]


def numbered(changes: Sequence[Change], seq: int) -> list[Entry]:
    return sorted(
        Entry(change.key, seq, change.kind, change.value, change.expire_at_ms) for change in changes
    )


async def test_a_large_batch_becomes_files_and_one_record() -> None:
    """All of it has one sequence number, and stands in files that were pending before they were."""
    database = await Database.created()
    async with loading(database) as writer:
        told = await writer.write(BATCH)
        receipt = await told.receipt()
        assert writer.admission.queued_bytes == 0
        assert writer.store.creates == 1 + 3 + 1  # a manifest, the files, the record
        assert writer.memtable.size_bytes == 0
    manifest = await database.manifest()
    [load] = await loads_in_wal(database)
    assert [each for each, _ in writer.landed] == [load]
    assert (load.seq, load.wal_id) == (receipt.seq, receipt.wal_id)
    assert len(load.ssts) == 3
    assert load.load_id.startswith(OWN_PREFIX)
    assert entries_of(database, manifest, load) == numbered(BATCH, receipt.seq)
    assert manifest.pending_loads == (PendingLoad(load.load_id, load.ssts),)
    [(_, pin)] = writer.landed
    assert writer.kept == [pin]
    assert pin is not None
    assert has_snapshot(manifest, pin.snapshot_id)
    [snapshot] = [each for each in manifest.snapshots if each.id == pin.snapshot_id]
    pinned = database.manifest_at(snapshot.manifest_id)
    assert is_pending(pinned, load.load_id)


@pytest.mark.parametrize("takes_effect", [False, True])
@pytest.mark.parametrize("dies_at", range(1, 7))
async def test_a_crash_leaves_all_or_nothing(dies_at: int, takes_effect: bool) -> None:  # noqa: FBT001
    """Wherever the writer dies, what is left is the whole batch, or no trace that is read."""
    database = await Database.created()
    store = MortalStore(database.objects)
    is_dead = False
    try:
        async with loading(database, store) as writer:
            store.dies_at, store.takes_effect = dies_at, takes_effect
            await (await writer.write(BATCH)).outcome()
    except* Died:
        is_dead = True
    manifest = await database.manifest()
    loads = await loads_in_wal(database)
    was_written = (dies_at == 5 and takes_effect) or dies_at > 5
    assert is_dead == (dies_at <= 5)
    assert len(loads) == was_written
    for load in loads:
        assert entries_of(database, manifest, load) == numbered(BATCH, load.seq)
        assert is_pending(manifest, load.load_id)
    opened = drop_unrecorded(manifest, [load.load_id for load in loads])
    assert [each.load_id for each in opened.pending_loads] == [each.load_id for each in loads]


async def test_a_call_that_ends_early_leaves_nothing() -> None:
    """A batch whose caller goes while files are written is not applied, nor pending for long."""
    database = await Database.created()
    async with loading(database) as writer:
        writer.store.gate.clear()
        call = asyncio.create_task(writer.write(BATCH))
        while not (await database.manifest()).pending_loads:
            await quiesce()
        call.cancel()
        await asyncio.wait([call])
        while (await database.manifest()).pending_loads:
            await quiesce()
        assert writer.admission.queued_bytes == 0
        writer.store.gate.set()
        await (await writer.write(BATCH[:3])).receipt()
    [load] = await loads_in_wal(database)
    assert len(load.ssts) == 1


async def test_a_call_that_ends_after_its_record_was_submitted_changes_nothing() -> None:
    """Files are committed all the same when the caller goes while the record is on its way."""
    database = await Database.created()
    infos = await _two_files(database)
    async with loading(database) as writer:
        call = asyncio.create_task(writer.loads.ingest("x", infos))
        while not writer.log.is_loading:
            await one_turn()
        call.cancel()
        await asyncio.wait([call])
        await writer.log.wait_loaded()
        assert (await writer.loads.ingest("x", infos)).already_applied
    assert len(await loads_in_wal(database)) == 1
    assert is_pending(await database.manifest(), "x")


async def _two_files(database: Database) -> list[SstInfo]:
    first = await file_of(database, 1, [Entry(b"a", 0, Kind.PUT, b"1"), Entry(b"b", 0, Kind.PUT)])
    second = await file_of(database, 2, [Entry(b"c", 0, Kind.TOMBSTONE)])
    return [first, second]


async def test_files_that_stand_ready_are_committed_once() -> None:
    """The same load is a no-op that says so: at once, later, and at the next writer."""
    database = await Database.created()
    infos = await _two_files(database)
    async with loading(database) as writer:
        both = await asyncio.gather(*(writer.loads.ingest("x", infos) for _ in range(2)))
        loaded = next(each for each in both if not each.already_applied)
        assert Loaded(loaded.seq, None) in both
        assert await writer.loads.ingest("x", infos) == Loaded(loaded.seq, None)
    [load] = await loads_in_wal(database)
    assert (load.load_id, load.seq, load.wal_id) == ("x", loaded.seq, loaded.wal_id)
    assert [entry.key for entry in entries_of(database, await database.manifest(), load)] == [
        b"a",
        b"b",
        b"c",
    ]
    async with loading(database) as writer:
        writer.loads.land(load)  # as it was replayed
        assert await writer.loads.ingest("x", infos) == Loaded(loaded.seq, None)

    def compact(manifest: Manifest) -> Manifest:
        after = with_committed(manifest, load, logical_time_ms=1, max_count=5)
        table = manifest.leveled_ssts.replace((), level_rows(load))
        return replace(after, leveled_ssts=table, wal_id_last_compacted=load.wal_id)

    await database.edit(compact)
    async with loading(database) as writer:
        assert await writer.loads.ingest("x", infos) == Loaded(loaded.seq, None)
        with pytest.raises(LoadUnknown, match="already"):
            await writer.loads.ingest("another id", infos)
        await quiesce()
    assert (await database.manifest()).pending_loads == ()


async def test_batches_of_a_stream_are_known_by_the_last() -> None:
    """A batch that comes again after a later one of its stream was applied before."""
    database = await Database.created()
    infos = await _two_files(database)
    async with loading(database) as writer:
        first = await writer.loads.ingest("query-4", infos[:1])
        second = await writer.loads.ingest("query-5", infos[1:])
        assert second.seq > first.seq
        assert (await writer.loads.ingest("query-4", infos[:1])).already_applied
        assert (await writer.loads.ingest("query-3", infos[:1])).already_applied
    assert len(await loads_in_wal(database)) == 2


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda info: replace(info, checksum=info.checksum ^ 1), "checksum"),
        (lambda info: replace(info, entry_count=info.entry_count + 1), "listed as"),
        (lambda info: replace(info, first_key=b"A"), "listed as"),
        (lambda info: replace(info, size_bytes=info.size_bytes + 8), ""),
        (lambda info: replace(info, id=info.id[:15] + b"\x77"), "no object"),
    ],
)
async def test_files_are_what_the_load_says(
    spoil: Callable[[SstInfo], SstInfo], problem: str
) -> None:
    """A file that is missing or differs from its listing is refused before anything is edited."""
    database = await Database.created()
    infos = await _two_files(database)
    async with loading(database) as writer:
        with pytest.raises(InvalidRequest, match=rf"ssts\[0\].*{problem}"):
            await writer.loads.ingest("x", [spoil(infos[0]), infos[1]])
        assert writer.store.creates == 0
        assert not (await writer.loads.ingest("x", infos)).already_applied


@pytest.mark.parametrize(
    ("entries", "ranges"),
    [
        ([Entry(b"a", 5, Kind.PUT)], []),
        ([Entry(b"a", 0, Kind.PUT)], [Entry(b"b", 0, Kind.RANGE_TOMBSTONE, b"c")]),
    ],
)
async def test_files_hold_what_a_load_may(entries: list[Entry], ranges: list[Entry]) -> None:
    """Entries with numbers of their own, and range deletes, are refused."""
    database = await Database.created()
    info = await file_of(database, 1, entries, ranges)
    async with loading(database) as writer:
        with pytest.raises(InvalidRequest, match="puts and tombstones"):
            await writer.loads.ingest("x", [info])


async def test_what_may_be_collected_is_not_loaded() -> None:
    """Files older than what a collector has deleted are refused, and nothing stays pending (F3)."""
    database = await Database.created()
    infos = await _two_files(database)
    await database.edit(lambda manifest: replace(manifest, gc_cutoff_ms=2**50))
    async with loading(database) as writer:
        with pytest.raises(LeaseLost):
            await writer.loads.ingest("x", infos)
        await quiesce()
    assert (await database.manifest()).pending_loads == ()
    assert await loads_in_wal(database) == []


def test_files_are_cut_by_their_size() -> None:
    """Each file of a batch has about `sst_bytes`, however large values are; all are there."""
    author = Authorship(bytes(16), WriterId(1, bytes(16)), bytes(6) + b"\x70" + bytes(9), 5)
    changes = [Change(b"%04d" % n, Kind.PUT, bytes(n * 37 % 5_000)) for n in range(800)]
    changes.insert(300, Change(b"0300 large", Kind.PUT, bytes(200_000)))
    files = encode_batch(changes, author, SETTINGS, Random(1).randbytes)
    found: list[Entry] = []
    for file in files:
        sst = open_sst(file.footer.properties.name, file.data, database_id=bytes(16))
        sst.audit()
        entries = [*sst.entries()]
        found += entries
        assert sum(len(each.key) + len(each.value) for each in entries[:-1]) <= SETTINGS.sst_bytes
    assert found == numbered(changes, 0)
    assert len(files) > 20
