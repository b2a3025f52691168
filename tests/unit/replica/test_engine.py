"""A replica: how it joins, what protects it, and that it never shows less than before (I6)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

import pytest

from shalekv.errors import DatabaseNotFound, ObjectNotFound, SnapshotNotFound, Stopping, WrongObject
from shalekv.format import names
from shalekv.format.sst import open_sst
from shalekv.protocol.snapshot import find_snapshot
from tests.kit.constants import set_constants
from tests.kit.engine.replica import TTL_S, ReplicatedDatabase, get, pass_s, running, scan
from tests.kit.store import FaultyStore, at_each
from tests.kit.virtual_time import virtual_time

ONE_READ = {"shalekv.replica.follow:PARALLEL_READS_MAX": 1}


@virtual_time(seed=1)
async def test_snapshot_is_renewed_while_the_log_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A replay that lasts longer than the lifetime of the snapshot loses nothing."""
    set_constants(monkeypatch, ONE_READ)
    database = await ReplicatedDatabase.created()
    for number in range(6):
        await database.put(**{f"k{number}": b"1"})
    slow = at_each("get", names.WAL_FOLDER, partial(pass_s, TTL_S / 3))
    store = FaultyStore(database.another_store(), before=slow)
    joining = asyncio.create_task(database.join(store))
    await pass_s(TTL_S + 5)
    await database.compact()
    await database.collect()
    engine = await joining
    assert len(await scan(engine)) == 6
    assert engine.levels.lost_count == 0


@virtual_time(seed=1)
async def test_joining_fails_when_the_log_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a snapshot, joining fails when listed objects are deleted before they are read."""
    set_constants(monkeypatch, ONE_READ)
    database = await ReplicatedDatabase.created()
    for number in range(4):
        await database.put(**{f"k{number}": b"1"})

    async def compact_and_collect() -> None:
        await database.compact()
        await database.collect()

    lose = at_each("get", names.wal_name(0), compact_and_collect)
    store = FaultyStore(database.another_store(), before=lose)
    with pytest.raises(ObjectNotFound):
        await database.join(store, snapshot="none")
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize("is_at_once", [False, True])
@virtual_time(seed=1)
async def test_continuing_behind_the_levels_shows_nothing_older(*, is_at_once: bool) -> None:
    """A call that waits for a commit that only the levels have never sees an older state (I6)."""
    database = await ReplicatedDatabase.created()
    await database.put(a=b"old", b=b"old")
    engine = await database.join()
    shown = await engine.committed_view()
    await database.put(a=b"new")
    await database.compact()
    await pass_s(TTL_S + 1)
    await database.collect()
    await engine.manifest.refresh()
    if is_at_once:  # before any other task may drop what is in memory
        await engine.levels.follow_manifest()
        assert await get(engine, b"a") == b"new"
    async with running(engine):
        await engine.watermark.wait_for(2)
        assert await get(engine, b"a") == b"new"
        assert await scan(engine) == [(b"a", b"new"), (b"b", b"old")]
        assert engine.watermark.seq == 2
        assert engine.levels.lost_count == 1
        assert engine.memtable.size_bytes == 0
        entry = shown.get(b"a")  # of a scan that began before
        assert entry is not None
        assert entry.value == b"old"


@virtual_time(seed=1)
async def test_lost_snapshot_takes_nothing_back_and_is_made_again() -> None:
    """A replica that lost its snapshot shows no less than before, and makes another one.

    It leaves no snapshot behind when it ends.
    """
    database = await ReplicatedDatabase.created()
    await database.put(a=b"1")
    await database.compact()
    await database.put(a=b"2")
    engine = await database.join()
    first = engine.pinned.snapshot_id
    await pass_s(TTL_S + 1)
    await database.edit(lambda m: replace(m, snapshots=()))
    await engine.manifest.refresh()
    await engine.levels.follow_manifest()
    assert (engine.watermark.seq, await get(engine, b"a")) == (2, b"2")
    assert engine.pinned.snapshot_id != first
    assert find_snapshot(await database.manifest(), engine.pinned.snapshot_id)
    async with running(engine):
        await database.put(b=b"1")
        await engine.catch_up()
        assert await scan(engine) == [(b"a", b"2"), (b"b", b"1")]
    await engine.release()
    assert (await database.manifest()).snapshots == ()


@virtual_time(seed=1)
async def test_a_lost_version_is_dropped_although_more_is_compacted_than_was_applied() -> None:
    """A read whose objects are gone begins again in existing levels, whatever was applied."""
    database = await ReplicatedDatabase.created()
    await database.put(a=b"1")
    await database.compact()
    engine = await database.join(snapshot="none")
    held = engine.pinned
    await database.put(a=b"2")
    await database.compact()
    await database.collect()
    with pytest.raises(ObjectNotFound) as missing:
        await held.find(b"a")
    reason = await engine.explain(missing.value, held)
    assert isinstance(reason, SnapshotNotFound)
    assert await get(engine, b"a") == b"2"
    newer = engine.pinned
    await engine.explain(missing.value, held)
    assert engine.pinned is newer  # which was not lost


@virtual_time(seed=1)
async def test_new_epoch_in_the_log_makes_the_manifest_be_read() -> None:
    """The first object of a new writer makes the replica read its address from the manifest."""
    database = await ReplicatedDatabase.created()
    await database.put(a=b"1")
    engine = await database.join(poll_interval_ms=250)
    async with running(engine):
        await database.take_over()
        await database.edit(lambda m: replace(m, writer_address="there:2"))
        await database.put(a=b"2")
        await pass_s(1)
        assert (engine.epoch, engine.writer_address) == (2, "there:2")


@pytest.mark.parametrize("is_made_again", [False, True])
@virtual_time(seed=1)
async def test_lost_database_ends_the_reader(*, is_made_again: bool) -> None:
    """An empty bucket, or another database in it, ends the replica with an error."""
    database = await ReplicatedDatabase.created()
    await database.put(a=b"1")
    engine = await database.join()
    for name in (names.MANIFEST_FOLDER, names.WAL_FOLDER):
        for info in database.objects.page(name, ""):
            database.objects.remove(info.name)
    if is_made_again:
        other = await ReplicatedDatabase.created(seed=1)
        for manifest in other.objects.page(names.MANIFEST_FOLDER, ""):
            await database.store.create(manifest.name, other.data(manifest.name))
    with pytest.raises((DatabaseNotFound, WrongObject)):
        async with asyncio.timeout(2 * TTL_S):
            await engine.run()
    assert await engine.ended() is not None
    with pytest.raises((DatabaseNotFound, WrongObject)):
        engine.check_serving()
    written = [info.name for info in database.objects.page(names.MANIFEST_FOLDER, "")]
    assert written == [names.manifest_name(n) for n in (0, 1) if is_made_again]


@virtual_time(seed=1)
async def test_end_of_a_replica_fails_waiting_calls() -> None:
    """Stopping a replica fails calls that wait for commits, and later polls at once."""
    database = await ReplicatedDatabase.created()
    engine = await database.join()
    async with running(engine):
        waiting = asyncio.create_task(engine.watermark.wait_for(7))
        await pass_s(1)
    with pytest.raises(Stopping):
        await waiting
    await engine.catch_up()
    with pytest.raises(Stopping):
        await engine.watermark.wait_for(7)
    assert await engine.ended() is None
    engine.check_serving()  # applied commits are still served


@virtual_time(seed=1)
async def test_object_that_the_levels_hold_is_not_applied_again() -> None:
    """Objects that were read before the log continued behind the levels change nothing."""
    database = await ReplicatedDatabase.created()
    engine = await database.join()
    await database.put(a=b"1")
    name = names.wal_name(0)
    found = open_sst(name, database.data(name), database_id=None)
    await database.compact()
    await engine.manifest.refresh()
    await engine.levels.follow_manifest(is_forced=True)
    engine.applier.apply_object(found)
    assert (engine.watermark.seq, engine.memtable.key_count) == (1, 0)
    assert await get(engine, b"a") == b"1"
