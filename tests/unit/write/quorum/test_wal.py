"""The quorum WAL: order of records, boundaries of objects, records in memory, and archiving."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest

from shalekv.clock import LoopClock
from shalekv.errors import Stopping
from shalekv.format import names
from shalekv.format.sst import open_sst
from shalekv.format.wal_record import make_record
from shalekv.protocol.entry import Entry, Kind
from shalekv.protocol.quorum_records import LogEnd, Record
from shalekv.settings import KIB
from shalekv.write.commit import WalContents
from shalekv.write.quorum.ledger import HeldRecords
from shalekv.write.quorum.wal import QuorumWal
from tests.kit.constants import set_constants
from tests.kit.engine.commits import keys_of
from tests.kit.quorum.log import QuorumDatabase
from tests.kit.virtual_time import virtual_time


def group(*keys: bytes, size: int = 1) -> WalContents:
    return WalContents([Entry(key, 1, Kind.PUT, bytes(size)) for key in keys])


async def opened_slots(database: QuorumDatabase) -> QuorumWal:
    """The WAL of a new writer, as group commit begins to use it."""
    opened = await database.opened()
    slots = opened.wal
    assert isinstance(slots, QuorumWal)
    slots.begin(opened.last_wal_id + 1)
    return slots


@virtual_time(5)
async def test_loads_are_alone_in_their_object() -> None:
    """A load ends the object before it, and the next group begins a new one."""
    database = await QuorumDatabase.created()
    slots = await opened_slots(database)
    taken = [slots.take(100, is_load=is_load) for is_load in (False, False, True, True, False)]
    assert taken == [1, 1, 2, 3, 4]
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(slots.run())
        for position, wal_id in enumerate(taken):
            contents = group(b"k%d" % wal_id)
            assert await slots.create(wal_id, contents, position=position) is None
        ends = {r.wal_id: r.ends_object for r in database.log(await _ahead(database)).records}
        assert (ends[2], ends[3]) == (True, True)
        running.cancel()


async def _ahead(database: QuorumDatabase) -> str:
    return max(database.nodes.nodes, key=lambda address: database.log(address).state.log.last.lsn)


@virtual_time(5)
async def test_records_keep_the_order_of_their_groups() -> None:
    """A group that takes long to encode is not overtaken by a later one."""
    database = await QuorumDatabase.created()
    slots = await opened_slots(database)
    large = group(*(b"large%07d" % n for n in range(5_000)))
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(slots.run())
        first, second = slots.take(1, is_load=False), slots.take(1, is_load=False)
        creating = tasks.create_task(slots.create(first, large, position=0))
        await slots.create(second, group(b"small"), position=1)
        await creating
        running.cancel()
    payloads = [r.payload for r in database.log(await _ahead(database)).records]
    assert b"large0000001" in payloads[1]
    assert b"small" in payloads[2]


@virtual_time(5)
async def test_a_record_has_no_later_time_than_it_may() -> None:
    """The time of a group stays before what a later transaction has found expires."""
    slots = await opened_slots(await QuorumDatabase.created())
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(slots.run())
        wal_id = slots.take(1, is_load=False)
        await slots.create(wal_id, group(b"a"), position=0, time_max_ms=7)
        held = await slots.unarchived(wal_id)
        running.cancel()
    assert held is not None
    assert held.properties.logical_time_ms == 7


@virtual_time(5)
async def test_held_and_archived_objects_are_equal() -> None:
    """An object read from memory before it is archived equals the archived one."""
    database = await QuorumDatabase.created()
    async with database.writing(archive_interval_ms=60_000) as writing:
        receipts = [await writing.put(key) for key in (b"a", b"b", b"c")]
        assert [each.wal_id for each in receipts] == [1, 1, 1]
        held = await writing.slots.unarchived(1)
        assert held is not None
        assert keys_of([*held.entries()]) == [b"a", b"b", b"c"]
        assert await database.wal() in ([], [0])
        await writing.slots.archive(1)
        assert await writing.slots.unarchived(1) is None
        assert await database.wal() == [0, 1]
        data = database.data(names.wal_name(1))
        found = open_sst(names.wal_name(1), data, database_id=database.database_id)
        assert [*found.entries()] == [*held.entries()]
        await writing.slots.archive()  # there is nothing more
        assert (await writing.put(b"d")).wal_id == 2


@virtual_time(5)
async def test_object_ends_although_its_archive_wait_was_cancelled() -> None:
    """A wait for the archive that is cancelled early leaves no object open for ever."""
    database = await QuorumDatabase.created()
    async with database.writing(
        archive_interval_ms=60_000, unarchived_log_bytes_max=256 * KIB
    ) as writing:
        await writing.put(b"a")
        for kept in database.logs():
            kept.can_archive = False
        writes = []
        for n in range(9):
            writes.append(writing.write(b"k%02d" % n, bytes(40 * KIB)))
            await LoopClock().sleep_ms(20)
        assert not writes[-1].outcomes
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(writing.slots.archive(writing.engine.log.next_wal_id - 1))
            await LoopClock().sleep_ms(20)
            waiting.cancel()
        for kept in database.logs():
            kept.can_archive = True
        last = max([(await write.receipt()).wal_id or 0 for write in writes])
        async with asyncio.timeout(5):
            while last not in await database.wal():
                await LoopClock().sleep_ms(5)


@virtual_time(5)
async def test_closing_fails_waits_for_the_archive() -> None:
    """Closing a writer fails the calls that wait for its archive."""
    database = await QuorumDatabase.created()
    async with asyncio.TaskGroup() as tasks:
        async with database.writing() as writing:
            await writing.put(b"a")
            for kept in database.logs():
                kept.can_archive = False
            waiting = tasks.create_task(_stopping(writing.slots.archive()))
            await LoopClock().sleep_ms(300)
        async with asyncio.timeout(5):
            assert await waiting
            assert await _stopping(writing.slots.archive())


async def _stopping(archiving: Awaitable[None]) -> bool:
    try:
        await archiving
    except Stopping:
        return True
    return False


@virtual_time(5)
async def test_objects_end_with_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records share an object up to its size limit, whatever the interval."""
    database = await QuorumDatabase.created()
    set_constants(monkeypatch, {"shalekv.write.quorum.wal:ARCHIVE_OBJECT_BYTES": 36 * KIB})
    async with database.writing(archive_interval_ms=600_000) as writing:
        receipts = [await writing.put(b"k%02d" % n, bytes(10 * KIB)) for n in range(9)]
        assert [each.wal_id for each in receipts] == [1, 1, 1, 2, 2, 2, 3, 3, 3]


PAYLOAD = bytes(1_000)


def records(*wal_ids: int) -> list[Record]:
    made: list[Record] = []
    last = LogEnd()
    for wal_id in wal_ids:
        record = make_record(last, epoch=1, wal_id=wal_id, ends_object=False, payload=PAYLOAD)
        made.append(record)
        last = record.mark
    return made


def test_objects_are_dropped_as_a_whole() -> None:
    """Archived records that no member needs are dropped up to the end of an object."""
    held = HeldRecords(LogEnd(), records(0, 0, 1, 1, 2))
    held.archived(1, committed_lsn=5)
    held.drop(needed_lsn=3, bytes_max=1 << 20)
    assert (held.base.lsn, held.last_lsn) == (2, 5)
    held.drop(needed_lsn=0, bytes_max=0)
    assert held.base.lsn == 4
    assert held.unarchived_bytes == held.size_bytes > len(PAYLOAD)


def test_what_is_not_archived_stays() -> None:
    """Records that are not archived, or not committed, are never dropped, at any size."""
    held = HeldRecords(LogEnd(), records(0, 1, 2))
    held.archived(2, committed_lsn=1)
    held.drop(needed_lsn=3, bytes_max=0)
    assert held.base.lsn == 1
    assert [record.lsn for record in held.after(1, bytes_max=1)] == [2]
    assert [record.lsn for record in held.after(1, bytes_max=1 << 20)] == [2, 3]
    assert [record.lsn for record in held.of_object(2, committed_lsn=3)] == [3]
    assert held.of_object(2, committed_lsn=2) == []
