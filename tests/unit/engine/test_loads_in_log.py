"""Loads in the log: each divides what is older from what is newer, whatever becomes of it."""

from __future__ import annotations

import asyncio

import pytest

from shalekv.core.entry import Entry, Kind
from shalekv.core.loads import CommittedLoad
from shalekv.core.manifest import PendingLoad
from shalekv.engine.commit import RECORD_BYTES, Claim, WalContents
from shalekv.engine.memtable import Memtable
from shalekv.engine.replay import Replayed, replay
from shalekv.errors import (
    UnsupportedVersion,
)
from shalekv.format import names
from shalekv.format.idempotency import (
    IdempotencyRecord,
    ReplyKind,
    decode_record,
    encode_record,
    record_key,
)
from shalekv.format.load_record import decode_load, load_entry
from shalekv.format.sst import Sst, open_sst
from shalekv.settings import StoreSettings
from shalekv.store.cas import CasStore
from shalekv.store.memory import MemoryStore
from tests.kit.engine.running_log import (
    DATABASE_ID,
    OLDER,
    OWN,
    RunningLog,
    Told,
    quiesce,
    running,
    slots_on,
    yielding_runtime,
)
from tests.unit.format.test_load_record import info, load

LOAD_BYTES = 3_000  # that are admitted for one
WIDTHS = pytest.mark.parametrize("k", [1, 2, 4])


class LoadingLog(RunningLog):
    """A log that takes loads, and notes what has landed, and in which order."""

    def __init__(self, *, k: int = 1, flush_bytes: int = 1) -> None:
        super().__init__(k=k, flush_bytes=flush_bytes)
        self.landed: list[CommittedLoad] = []
        self.told_before_landing = 0
        self.log.land_load = self._land

    def _land(self, landed: CommittedLoad) -> None:
        self.told_before_landing += sum(bool(write.told) for write in self.writes[-1:])
        assert self.prefix.seq == landed.seq
        assert self.prefix.is_whole
        self.landed.append(landed)

    def ingest(self, pending: PendingLoad, *, claim: Claim | None = None) -> Told:
        told = Told()
        assert self.admission.try_admit(LOAD_BYTES + (0 if claim is None else RECORD_BYTES))
        self.log.ingest(pending, told.settle, size_bytes=LOAD_BYTES, claim=claim)
        self.writes.append(told)
        return told

    def sst(self, wal_id: int) -> Sst:
        name = names.wal_name(wal_id)
        return open_sst(name, self.store.data(name), database_id=DATABASE_ID)


@WIDTHS
async def test_a_load_is_alone(k: int) -> None:
    """It waits for all before it, is alone in its object, and holds back all that comes after."""
    log = LoadingLog(k=k)
    async with running(log):
        before = [log.write(b"a%d" % n) for n in range(3)]
        told = log.ingest(load(info(0)))
        after = [log.write(b"b%d" % n) for n in range(3)]
        assert log.log.is_loading
        await quiesce()
        assert len(log.store.waiting) == min(k, 3)  # with k of 4 there is room for the load
        for count in range(1, 4):
            (await log.store.arrived(count)).release()
        held = await log.store.arrived(4)
        await quiesce()
        assert log.store.waiting == [held]
        assert held.name == names.wal_name(13)
        assert [len(write.told) for write in before] == [1, 1, 1]
        waiting = asyncio.create_task(log.log.wait_loaded())
        await quiesce()
        assert not waiting.done()
        held.release()
        receipt = await told.receipt()
        await waiting
        assert not log.log.is_loading
        assert (receipt.seq, receipt.wal_id) == (103, 13)
        assert log.landed == [CommittedLoad("load-1", load(info(0)).ssts, 103, 13)]
        assert log.told_before_landing == 0
        assert not any(write.told for write in after)
        log.store.let_go()
        assert [(await write.receipt()).seq for write in after] == [104, 105, 106]
    sst = log.sst(13)
    [entry] = sst.control_entries()
    assert (entry.seq, decode_load("", entry)) == (103, load(info(0)))
    assert sst.footer.contents.entry_count == 1


@WIDTHS
async def test_a_displaced_load_gets_another_number(k: int) -> None:
    """When a slow opener's fence took its slot, the record has the number of its new place."""
    log = LoadingLog(k=k)
    async with running(log):
        told = log.ingest(load(info(0)))
        held = await log.store.arrived(1)
        log.write(b"later")
        await log.fill(10, OLDER)
        held.release()
        log.store.let_go()
        receipt = await told.receipt()
    assert receipt.wal_id == 11
    [entry] = log.sst(11).control_entries()
    assert entry.seq == receipt.seq == log.landed[0].seq > 100
    assert log.sst(12).footer.contents.min_seq > receipt.seq
    assert log.landed[0].wal_id == 11


async def test_a_record_of_the_request_lands_with_the_load() -> None:
    """The idempotency record of a batch that became a load stands in the same object."""
    claim = Claim(b"key", b"h" * 16, 99_000, ReplyKind.WRITE, lambda _: b"reply")
    log = LoadingLog()
    async with running(log):
        told = log.ingest(load(info(0)), claim=claim)
        (await log.store.arrived(1)).release()
        receipt = await told.receipt()
    sst = log.sst(10)
    [record] = sst.system_entries()
    assert (record.key, record.seq) == (record_key(b"key"), receipt.seq)
    assert decode_record("", record.value).wal_id == 10
    assert receipt.record == record
    assert len([*sst.control_entries()]) == 1


async def test_loads_are_replayed_in_their_place() -> None:
    """Replay tells of a load when all older commits are in memory, and none that is newer."""
    store = MemoryStore(lambda: 0)
    slots = slots_on(store, OWN)
    put_a, put_b = Entry(b"a", 3, Kind.PUT, b"1"), Entry(b"b", 9, Kind.PUT, b"2")
    record = encode_record(IdempotencyRecord(b"h" * 16, 1, ReplyKind.WRITE, b"reply"))
    records = [Entry(record_key(b"key"), 5, Kind.PUT, record, 99)]
    two = [load_entry(load(info(1), load_id="a"), 7), load_entry(load(load_id="b"), 6)]
    await slots.create(0, WalContents([put_a]))
    await slots.create(1, WalContents(records=records, control=[load_entry(load(), 5)]))
    await slots.create(2, WalContents(control=two))
    await slots.create(3, WalContents([put_b]))
    memtable = Memtable()
    seen: list[tuple[str, int, bool, bool]] = []

    def land(landed: CommittedLoad) -> None:
        has_a, has_b = [memtable.get(key) is not None for key in (b"a", b"b")]
        seen.append((landed.load_id, landed.seq, has_a, has_b))

    replayed = Replayed(memtable, 0, 0, land_load=land)
    cas = CasStore(store, yielding_runtime(), StoreSettings())
    await replay(cas, range(4), database_id=DATABASE_ID, replayed=replayed, parallel_reads=2)
    assert seen == [("load-1", 5, True, False), ("b", 6, True, False), ("a", 7, True, False)]
    assert [(each.load_id, each.seq, each.wal_id) for each in replayed.loads] == [
        ("load-1", 5, 1),
        ("b", 6, 2),
        ("a", 7, 2),
    ]
    assert replayed.loads[0].ssts == load().ssts
    assert replayed.records == records
    assert replayed.last_seq == 9


async def test_a_record_that_cannot_be_read_ends_the_replay() -> None:
    """A load that this version does not understand is an error, not a load that is left out."""
    store = MemoryStore(lambda: 0)
    entry = load_entry(load(), 5)
    later = entry._replace(value=b"\x02" + entry.value[1:])
    await slots_on(store, OWN).create(0, WalContents(control=[later]))
    replayed = Replayed(Memtable(), 0, 0)
    cas = CasStore(store, yielding_runtime(), StoreSettings())
    with pytest.raises(UnsupportedVersion, match="version 2"):
        await replay(cas, range(1), database_id=DATABASE_ID, replayed=replayed, parallel_reads=2)
    assert replayed.loads == []
