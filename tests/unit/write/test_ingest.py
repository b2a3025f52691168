"""A load is committed whole or not at all, once; it divides older from newer commits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import pytest

from shalekv.errors import InvalidRequest, LeaseLost, LoadUnknown, UnsupportedVersion
from shalekv.format import names
from shalekv.format.records import decode_load, load_entry
from shalekv.format.sst import Sst, open_sst
from shalekv.protocol.entry import Entry, Kind
from shalekv.protocol.fencing import WriterId
from shalekv.protocol.loads import (
    OWN_PREFIX,
    CommittedLoad,
    drop_unrecorded,
    is_pending,
    level_rows,
    with_committed,
)
from shalekv.protocol.manifest import Manifest, PendingLoad
from shalekv.protocol.snapshot import has_snapshot
from shalekv.protocol.sst_table import SstInfo
from shalekv.protocol.transaction import Change
from shalekv.read.memtable import Memtable
from shalekv.read.replay import Replayed, replay
from shalekv.settings import StoreSettings
from shalekv.store.cas import CasStore
from shalekv.store.memory import MemoryStore
from shalekv.write.commit import RECORD_BYTES, Commit, Group, KeyedRequest, WalContents
from shalekv.write.ingest import FileOwner, Loaded, encode_batch
from tests.kit.engine.databases import Database
from tests.kit.engine.loading import SETTINGS, entries_of, file_of, loading, loads_in_wal, one_turn
from tests.kit.engine.running_log import (
    DATABASE_ID,
    OLDER,
    OWN,
    RunningLog,
    Settlement,
    quiesce,
    running,
    slots_on,
    yielding_runtime,
)
from tests.kit.manifests import info
from tests.kit.manifests import load as load_of
from tests.kit.store import Gate, MortalProcess, dying_at_each_request

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
    """A large batch has one sequence number, and its files were pending before they existed."""
    database = await Database.created()
    async with loading(database) as writer:
        settlement = await writer.write(BATCH)
        receipt = await settlement.receipt()
        assert writer.admission.queued_bytes == 0
        assert len(writer.store.asked("create")) == 1 + 3 + 1  # a manifest, the files, the record
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


async def test_a_crash_leaves_all_or_nothing() -> None:
    """Wherever the writer crashes, the whole batch is readable, or nothing of it."""

    async def run(process: MortalProcess) -> None:
        database = await Database.created()

        async def write() -> None:
            async with loading(database, process.store(database.another_store())) as writer:
                await (await writer.write(BATCH)).outcome()

        is_alive = await process.run(write())
        manifest = await database.manifest()
        loads = await loads_in_wal(database)
        assert len(loads) == is_alive
        for load in loads:
            assert entries_of(database, manifest, load) == numbered(BATCH, load.seq)
            assert is_pending(manifest, load.load_id)
        opened = drop_unrecorded(manifest, [load.load_id for load in loads])
        assert [each.load_id for each in opened.pending_loads] == [each.load_id for each in loads]

    assert await dying_at_each_request(run) >= 1 + 3 + 1


async def test_a_call_that_ends_early_leaves_nothing() -> None:
    """A batch whose caller leaves while files are written is not applied, nor pending for long."""
    database = await Database.created()
    async with loading(database) as writer:
        writer.store.before = gate = Gate("create", names.LEVELS_FOLDER, is_open=False)
        call = asyncio.create_task(writer.write(BATCH))
        while not (await database.manifest()).pending_loads:
            await quiesce()
        call.cancel()
        await asyncio.wait([call])
        while (await database.manifest()).pending_loads:
            await quiesce()
        assert writer.admission.queued_bytes == 0
        gate.open()
        await (await writer.write(BATCH[:3])).receipt()
    [load] = await loads_in_wal(database)
    assert len(load.ssts) == 1


async def test_a_call_that_ends_after_its_record_was_submitted_changes_nothing() -> None:
    """Files are committed even if the caller leaves while the record is in flight."""
    database = await Database.created()
    infos = await _two_files(database)
    async with loading(database) as writer:
        call = asyncio.create_task(writer.loads.ingest("x", infos))
        while not writer.log.pending_writes.is_loading:
            await one_turn()
        call.cancel()
        await asyncio.wait([call])
        await writer.log.pending_writes.wait_loaded()
        assert (await writer.loads.ingest("x", infos)).already_applied
    assert len(await loads_in_wal(database)) == 1
    assert is_pending(await database.manifest(), "x")


async def _two_files(database: Database) -> list[SstInfo]:
    first = await file_of(database, 1, [Entry(b"a", 0, Kind.PUT, b"1"), Entry(b"b", 0, Kind.PUT)])
    second = await file_of(database, 2, [Entry(b"c", 0, Kind.TOMBSTONE)])
    return [first, second]


async def test_ready_made_files_are_committed_once() -> None:
    """Repeating a load changes nothing and says so: at once, later, and at the next writer."""
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
        assert writer.store.asked("create") == []
        assert not (await writer.loads.ingest("x", infos)).already_applied


@pytest.mark.parametrize(
    ("entries", "ranges"),
    [
        ([Entry(b"a", 5, Kind.PUT)], []),
        ([Entry(b"a", 0, Kind.PUT)], [Entry(b"b", 0, Kind.RANGE_TOMBSTONE, b"c")]),
    ],
)
async def test_files_with_sequence_numbers_are_refused(
    entries: list[Entry], ranges: list[Entry]
) -> None:
    """Entries with sequence numbers, and range deletes, are refused."""
    database = await Database.created()
    info = await file_of(database, 1, entries, ranges)
    async with loading(database) as writer:
        with pytest.raises(InvalidRequest, match="puts and tombstones"):
            await writer.loads.ingest("x", [info])


async def test_collectable_files_are_not_loaded() -> None:
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
    """Each file of a batch has about `sst_bytes`, however large values are, and none is lost."""
    owner = FileOwner(bytes(16), WriterId(1, bytes(16)), bytes(6) + b"\x70" + bytes(9), 5)
    changes = [Change(b"%04d" % n, Kind.PUT, bytes(n * 37 % 5_000)) for n in range(800)]
    changes.insert(300, Change(b"0300 large", Kind.PUT, bytes(200_000)))
    files = encode_batch(changes, owner, SETTINGS, Random(1).randbytes)
    found: list[Entry] = []
    for file in files:
        sst = open_sst(file.footer.properties.name, file.data, database_id=bytes(16))
        sst.audit()
        entries = [*sst.entries()]
        found += entries
        assert sum(len(each.key) + len(each.value) for each in entries[:-1]) <= SETTINGS.sst_bytes
    assert found == numbered(changes, 0)
    assert len(files) > 20


LOAD_BYTES = 3_000  # admitted for each
WIDTHS = pytest.mark.parametrize("k", [1, 2, 4])


class LoadingLog(RunningLog):
    """A log that accepts loads, and notes what has landed, and in which order."""

    def __init__(self, *, k: int = 1, flush_bytes: int = 1) -> None:
        super().__init__(k=k, flush_bytes=flush_bytes)
        self.landed: list[CommittedLoad] = []
        self.settled_before_landing = 0

    def publish(self, group: Group) -> None:
        super().publish(group)
        if group.load is not None:
            self._land(group.load)

    def _land(self, landed: CommittedLoad) -> None:
        self.settled_before_landing += sum(bool(write.outcomes) for write in self.writes[-1:])
        assert self.watermark.seq == landed.seq
        assert self.watermark.is_whole
        self.landed.append(landed)

    def ingest(self, pending: PendingLoad, *, keyed: KeyedRequest | None = None) -> Settlement:
        settlement = Settlement()
        assert self.admission.try_admit(LOAD_BYTES + (0 if keyed is None else RECORD_BYTES))
        self.log.submit(
            Commit.of_load(
                pending, self.log.next_seq, settlement.settle, size_bytes=LOAD_BYTES, keyed=keyed
            )
        )
        self.writes.append(settlement)
        return settlement

    def sst(self, wal_id: int) -> Sst:
        name = names.wal_name(wal_id)
        return open_sst(name, self.store.data(name), database_id=DATABASE_ID)


@WIDTHS
async def test_a_load_is_alone(k: int) -> None:
    """A load waits for all before it, is alone in its object, and delays all that comes after."""
    log = LoadingLog(k=k)
    async with running(log):
        before = [log.write(b"a%d" % n) for n in range(3)]
        settlement = log.ingest(load_of(info(0)))
        after = [log.write(b"b%d" % n) for n in range(3)]
        assert log.log.pending_writes.is_loading
        await quiesce()
        assert len(log.store.waiting) == min(k, 3)  # at k = 4 a slot would be free for the load
        for count in range(1, 4):
            (await log.store.arrived(count)).release()
        held = await log.store.arrived(4)
        await quiesce()
        assert log.store.waiting == [held]
        assert held.name == names.wal_name(13)
        assert [len(write.outcomes) for write in before] == [1, 1, 1]
        waiting = asyncio.create_task(log.log.pending_writes.wait_loaded())
        await quiesce()
        assert not waiting.done()
        held.release()
        receipt = await settlement.receipt()
        await waiting
        assert not log.log.pending_writes.is_loading
        assert (receipt.seq, receipt.wal_id) == (103, 13)
        assert log.landed == [CommittedLoad("load-1", load_of(info(0)).ssts, 103, 13)]
        assert log.settled_before_landing == 0
        assert not any(write.outcomes for write in after)
        log.store.release_all()
        assert [(await write.receipt()).seq for write in after] == [104, 105, 106]
    sst = log.sst(13)
    [entry] = sst.control_entries()
    assert (entry.seq, decode_load("", entry)) == (103, load_of(info(0)))
    assert sst.footer.contents.entry_count == 1


@WIDTHS
async def test_a_displaced_load_gets_another_number(k: int) -> None:
    """A load whose slot a slow opener's fence took has the number of its new place."""
    log = LoadingLog(k=k)
    async with running(log):
        settlement = log.ingest(load_of(info(0)))
        held = await log.store.arrived(1)
        log.write(b"later")
        await log.fill(10, OLDER)
        held.release()
        log.store.release_all()
        receipt = await settlement.receipt()
    assert receipt.wal_id == 11
    [entry] = log.sst(11).control_entries()
    assert entry.seq == receipt.seq == log.landed[0].seq > 100
    assert log.sst(12).footer.contents.min_seq > receipt.seq
    assert log.landed[0].wal_id == 11


async def test_a_record_that_cannot_be_read_ends_the_replay() -> None:
    """A load record that this version cannot read is an error, and is not skipped."""
    store = MemoryStore(lambda: 0)
    entry = load_entry(load_of(), 5)
    later = entry._replace(value=b"\x02" + entry.value[1:])
    await slots_on(store, OWN).create(0, WalContents(control=[later]))
    replayed = Replayed(Memtable(), 0, 0)
    cas = CasStore(store, yielding_runtime(), StoreSettings())
    with pytest.raises(UnsupportedVersion, match="version 2"):
        await replay(cas, range(1), database_id=DATABASE_ID, replayed=replayed, parallel_reads=2)
    assert replayed.loads == []
