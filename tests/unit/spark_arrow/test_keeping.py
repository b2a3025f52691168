"""The snapshot of a task is renewed in time by the store's clock, and its loss is noticed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from shalekv.errors import CorruptObject, ObjectNotFound, SnapshotNotFound, StoreUnavailable
from shalekv.format import names
from shalekv.protocol.entry import KeyRange
from shalekv.protocol.manifest import Snapshot
from shalekv.protocol.snapshot import NEVER
from shalekv.settings import StoreSettings
from shalekv.store.cas import CasStore
from shalekv_spark.arrow.reading import SnapshotKeeper
from shalekv_spark.scanning.scan_task import ScanTask, WalSlot
from tests.kit.engine.collection import CollectedDatabase
from tests.kit.engine.hand_clock import HandClock, hand_runtime
from tests.kit.store import FaultyStore, Request, at_each
from tests.unit.spark_arrow.scanned import NOWHERE, rows_of_task

TTL_S = 60
TTL_MS = TTL_S * 1_000
TURNS = 300  # of the event loop: enough for any edit


@dataclass
class Kept:
    """A snapshot that a task keeps, with independent clocks of process and store."""

    database: CollectedDatabase
    clock: HandClock
    keeper: SnapshotKeeper
    refused: list[str]  # not empty: the store does not answer

    async def pass_time(self, seconds: float, *, store_seconds: float | None = None) -> None:
        """Advance our clock, and that of the store by the same or a given time."""
        self.database.pass_time(seconds if store_seconds is None else store_seconds)
        self.clock.advance(seconds * 1_000)
        await self.settle()

    async def settle(self) -> None:
        for _ in range(TURNS):
            await self.clock.sleep_ms(0)

    async def left_s(self) -> float:
        """Return how long the snapshot will live by the store's clock."""
        (found,) = (await self.database.manifest()).snapshots
        return found.snapshot_expire_time_s - self.database.now_s


@asynccontextmanager
async def kept(ttl_ms: int | None = TTL_MS) -> AsyncIterator[Kept]:
    database, clock, refused = await CollectedDatabase.created(), HandClock(), list[str]()
    snapshot = await database.snapshots().create(ttl_ms=ttl_ms)

    async def before(_: Request) -> None:
        if refused:
            raise StoreUnavailable("store", "get", "an object", refused[0])

    store = FaultyStore(database.store, before=before)
    settings = StoreSettings(read_attempts=1)
    keeper = SnapshotKeeper(CasStore(store, hand_runtime(clock, 1), settings), snapshot.id, TTL_MS)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(keeper.keep())
        found = Kept(database, clock, keeper, refused)
        await found.settle()
        yield found
        task.cancel()


async def test_it_is_renewed_when_half_of_its_life_is_over() -> None:
    """A snapshot is renewed when half of its time is over, not before, and repeatedly."""
    async with kept() as each:
        first_id = (await each.database.manifest()).manifest_id
        await each.pass_time(TTL_S * 0.4)
        assert (await each.database.manifest()).manifest_id == first_id
        for _ in range(20):
            await each.pass_time(TTL_S * 0.3)
            assert await each.left_s() > TTL_S * 0.2
            each.keeper.check()
        assert (await each.database.manifest()).manifest_id > first_id + 5


async def test_one_that_never_expires_is_left_alone() -> None:
    """A snapshot that never expires is not renewed, so that it gets no expiry."""
    async with kept(None) as each:
        await each.pass_time(TTL_S * 10)
        (snapshot,) = (await each.database.manifest()).snapshots
        assert snapshot.snapshot_expire_time_s == NEVER
        each.keeper.check()


async def test_one_that_has_expired_by_the_stores_clock_is_gone() -> None:
    """A snapshot that has expired by the store's clock is gone, even if it has time left by
    ours and is in the manifest.
    """
    async with kept() as each:
        await each.pass_time(TTL_S * 0.7, store_seconds=TTL_S * 2)
        with pytest.raises(SnapshotNotFound):
            each.keeper.check()
        assert (await each.database.manifest()).snapshots


async def test_one_that_was_deleted_is_gone() -> None:
    """Deleting the snapshot of a scan ends the scan."""
    async with kept() as each:
        (snapshot,) = (await each.database.manifest()).snapshots
        await each.database.snapshots().delete(snapshot.id.hex())
        await each.pass_time(TTL_S * 0.7)
        with pytest.raises(SnapshotNotFound):
            each.keeper.check()


async def test_a_store_that_does_not_answer_for_a_while() -> None:
    """While the store does not answer, renewals are tried again until the snapshot must
    have expired.
    """
    async with kept() as each:
        each.refused.append("gone fishing")
        await each.pass_time(TTL_S * 0.7)
        each.keeper.check()
        each.refused.clear()
        await each.pass_time(TTL_S * 0.1)
        assert await each.left_s() > TTL_S * 0.9
        each.refused.append("gone for good")
        for _ in range(20):
            await each.pass_time(TTL_S * 0.1)
        with pytest.raises(StoreUnavailable, match="gone for good"):
            each.keeper.check()


async def log_of(database: CollectedDatabase, snapshot: Snapshot) -> ScanTask:
    """Make a task that reads three objects of the WAL, and does not renew its snapshot."""
    await database.wal(3)
    sizes = {info.name: info.size_bytes async for info in database.store.list(names.WAL_FOLDER)}
    return ScanTask(
        place=NOWHERE,
        database_id=database.database_id,
        keys=KeyRange(b"", b""),
        sources=[],
        seq=database.last_seq,
        now_ms=0,
        wal=[WalSlot(wal_id, sizes[names.wal_name(wal_id)]) for wal_id in range(3)],
        columns=("key",),
        snapshot_id=snapshot.id,
    )


async def test_slots_count_if_the_snapshot_has_outlived_their_reading() -> None:
    """Rows of WAL slots are valid only if the snapshot still lives after they were read (F1)."""
    database = await CollectedDatabase.created()
    task = await log_of(database, await database.snapshots().create(ttl_ms=TTL_MS))
    assert len(await rows_of_task(database.cas(), task)) == 3
    database.pass_time(TTL_S + 2)
    with pytest.raises(SnapshotNotFound):
        await rows_of_task(database.cas(), task)


async def test_a_task_renews_the_snapshot_that_it_reads() -> None:
    """A task renews its snapshot while it waits for the store, if it has a time to live."""
    database = await CollectedDatabase.created()
    task = await log_of(database, await database.snapshots().create(ttl_ms=TTL_MS))

    async def wait() -> None:
        for _ in range(TURNS):
            await HandClock().sleep_ms(0)

    database.pass_time(TTL_S * 0.6)
    store = FaultyStore(database.store, before=at_each("get_range", "", wait))
    for ttl_s, is_renewed in ((0, False), (TTL_S, True)):
        renewing = replace(task, snapshot_ttl_s=ttl_s)
        assert len(await rows_of_task(database.cas(store), renewing)) == 3
        (snapshot,) = (await database.manifest()).snapshots
        assert (snapshot.snapshot_expire_time_s > database.now_s + TTL_S * 0.9) is is_renewed


@pytest.mark.parametrize("is_gone", [True, False])
@pytest.mark.parametrize("is_damaged", [True, False])
async def test_what_is_missing_has_a_reason(*, is_gone: bool, is_damaged: bool) -> None:
    """A missing object is reported as `SnapshotNotFound` if the snapshot is gone, else as
    missing.
    """
    database = await CollectedDatabase.created()
    snapshot = await database.snapshots().create(ttl_ms=TTL_MS)
    task = await log_of(database, snapshot)
    name = names.wal_name(1)
    data = (await database.store.get(name)).data
    await database.store.delete([name])
    if is_damaged:
        await database.store.create(name, bytes(8) + data[8:])
    if is_gone:
        await database.snapshots().delete(snapshot.id.hex())
    expected = SnapshotNotFound if is_gone else CorruptObject if is_damaged else ObjectNotFound
    with pytest.raises(expected):
        await rows_of_task(database.cas(), task)
