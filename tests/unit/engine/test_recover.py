"""Opening: what is fenced, which numbers are taken, what is refused, and who wins a race."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from shalekv.core.fencing import SEQ_GAP, Occupant, WriterId
from shalekv.core.manifest import CasMode, Manifest, WalMode
from shalekv.core.sst_table import SstInfo, SstTable
from shalekv.engine.opened_log import OpenedLog
from shalekv.engine.wal import occupant_of
from shalekv.errors import (
    DatabaseMismatch,
    Fenced,
    ManifestConflict,
)
from shalekv.format import names
from shalekv.format.sst import open_sst
from tests.kit.engine.commits import put
from tests.kit.engine.databases import Database, contents
from tests.kit.engine.running_log import quiesce
from tests.kit.store import HeldStore
from tests.sim.run import simulate
from tests.sim.world import World

A_LEVEL_SST = SstInfo(
    id=bytes.fromhex("01890a5dac967b2e8c5a0f1e2d3c4b5a"),
    level=1,
    first_key=b"a",
    last_key=b"b",
    filter_offset=0,
    filter_len=0,
    block_meta_offset=8,
    block_meta_len=8,
    min_seq=1,
    max_seq=1,
    entry_count=1,
    tombstone_count=0,
    size_bytes=100,
    checksum=1,
)
LEVELS = SstTable.from_infos([A_LEVEL_SST])


def own(opened: OpenedLog) -> WriterId:
    """The name of an opening."""
    return opened.manifest.own


def occupant(database: Database, manifest: Manifest, wal_id: int) -> Occupant:
    """Who has a slot."""
    name = names.wal_name(wal_id)
    return occupant_of(open_sst(name, database.data(name), database_id=manifest.database_id))


async def test_fresh_database_is_opened() -> None:
    """The first opening takes epoch 1, one fence, and the sequence numbers from 1 on."""
    database = await Database.created()
    opened = await database.open()
    assert own(opened).epoch == 1
    assert (opened.first_seq, opened.last_seq, opened.last_wal_id) == (1, 0, 0)
    assert (opened.objects_replayed, opened.memtable.key_count) == (0, 0)
    manifest = await database.manifest()
    assert occupant(database, manifest, 0) == Occupant(own(opened), is_fence=True)
    assert (manifest.writer_epoch, manifest.writer_nonce) == (1, own(opened).nonce)
    assert (manifest.writer_address, manifest.writer_first_seq) == ("here:1", 1)
    (snapshot,) = manifest.snapshots
    assert (manifest.wal_id_last_seen, snapshot.id) == (0, opened.held.snapshot_id)
    assert snapshot.manifest_id == opened.held.tree.manifest_id == manifest.manifest_id


async def test_numbers_go_on_far_above_all_that_may_have_been_shown() -> None:
    """Each writer begins 2**32 above what is durable and above where the last one began (I5)."""
    database = await Database.created()
    first = await database.open()
    await database.fill(1, own(first), 5, put(b"a"))
    second = await database.open()
    third = await database.open()
    assert (first.first_seq, second.first_seq) == (1, 5 + SEQ_GAP)
    assert third.first_seq == second.first_seq + SEQ_GAP


@pytest.mark.parametrize("k", [1, 2, 3, 4])
async def test_as_many_fences_as_older_writers_may_have_in_flight(k: int) -> None:
    """The run of fences is as wide as the widest writer that is not fenced yet, then shrinks."""
    database = await Database.created()
    await database.open(k=k)
    assert await database.wal() == list(range(k))
    assert (await database.manifest()).fence_width == k
    lowered = await database.open(k=1)
    assert await database.wal() == list(range(2 * k))
    manifest = await database.manifest()
    assert (manifest.fence_width, manifest.max_parallel_writes) == (1, 1)
    assert lowered.last_wal_id == 2 * k - 1
    await database.open(k=1)
    assert await database.wal() == list(range(2 * k + 1))


async def test_logical_time_does_not_go_back() -> None:
    """A new writer's clock begins where the WAL and the manifest have ended (I5)."""
    database = await Database.created()
    first = await database.open()
    await database.fill(1, own(first), 1, put(b"a"))
    second = await database.open()
    ahead_ms = second.time.now_ms() + 10**9
    await database.edit(lambda m: replace(m, logical_time_ms=ahead_ms))
    third = await database.open()
    assert third.time.now_ms() >= ahead_ms


@pytest.mark.parametrize("mode", [{"cas_mode": CasMode.TWO_PHASE}, {"wal_mode": WalMode.QUORUM}])
async def test_database_of_another_mode_is_refused(mode: dict[str, Any]) -> None:
    """A database is opened as it was created, or not at all: nothing is written."""
    database = await Database.created()
    before = await database.edit(lambda m: replace(m, **mode))
    with pytest.raises(DatabaseMismatch):
        await database.open()
    assert await database.manifest() == before


async def test_mode_that_is_switched_during_the_opening_is_found() -> None:
    """No epoch is won in the other mode: its writers would not be fenced by ours (CE15)."""
    database = await Database.created()
    store = HeldStore(database.objects, folder=names.MANIFEST_FOLDER)
    opening = asyncio.create_task(database.open(store))
    held = await store.arrived(1)
    switched = await database.edit(lambda m: replace(m, wal_mode=WalMode.QUORUM))
    held.release()
    with pytest.raises(DatabaseMismatch, match="quorum"):
        await opening
    assert await database.manifest() == switched


async def test_levels_that_appear_during_the_opening_are_read() -> None:
    """What is compacted while we fence is replayed or read; the newest levels are served."""
    database = await Database.created()
    first = await database.open()
    await database.fill(1, own(first), 1, put(b"a"))
    store = HeldStore(database.objects)
    opening = asyncio.create_task(database.open(store))
    await store.arrived(1)
    await database.edit(
        lambda m: replace(m, leveled_ssts=LEVELS, wal_id_last_compacted=1, last_compacted_seq=1)
    )
    store.let_go()
    tree = (await opening).held.tree
    assert (tree.wal_id, [run.ssts[0].id for run in tree.runs]) == (1, [LEVELS[0].id])


def test_conflicts_for_too_long_are_told() -> None:
    """An opening that never wins gives up after its time, with an error of its own."""

    async def main(world: World) -> None:
        database = await Database.created()
        store = HeldStore(database.objects, folder=names.MANIFEST_FOLDER)
        began_ms = world.now_ms
        with pytest.raises(ManifestConflict, match="within 500 ms"):
            await database.open(store, open_timeout_ms=500)
        assert world.now_ms - began_ms == pytest.approx(500, abs=1)

    simulate(0, main)


async def test_opener_with_a_recycled_epoch_is_fenced_before_it_serves() -> None:
    """Of two openers with one epoch number, the one that the manifest does not show is fenced.

    However it came to believe in its claim: its fences do not count, and it touches no data.
    """
    database = await Database.created()
    store = HeldStore(database.objects)
    opening = asyncio.create_task(database.open(store))
    fence = await store.arrived(1)
    claim = await database.manifest()
    await database.edit(lambda m: replace(m, writer_nonce=b"r" * 16))
    fence.release()
    with pytest.raises(Fenced, match=f"manifest {claim.manifest_id + 1} belongs to epoch 1"):
        await opening


async def test_fences_in_recycled_slots_do_not_count() -> None:
    """Fences at slots that were compacted and collected meanwhile are made again behind c (I3)."""
    database = await Database.created()
    first = await database.open()
    store = HeldStore(database.objects)
    opening = asyncio.create_task(database.open(store))
    stalled = await store.arrived(1)
    await database.fill(1, own(first), 1, put(b"a", b"1"))
    await database.fill(2, own(first), 2, put(b"b", b"2"))
    await database.edit(lambda m: replace(m, wal_id_last_compacted=1, last_compacted_seq=1))
    await database.remove(names.wal_name(1))
    stalled.release()  # creates slot 1 a second time
    again = await store.arrived(2)
    assert again.name == names.wal_name(3)
    store.let_go()
    opened = await opening
    assert (opened.last_wal_id, contents(opened)) == (3, [(b"b", b"2")])


async def test_wal_is_protected_while_it_is_replayed() -> None:
    """From the claim to the end of the replay the manifest holds a snapshot under our nonce."""
    database = await Database.created()
    store = HeldStore(database.objects)
    opening = asyncio.create_task(database.open(store, open_snapshot_ttl_s=100))
    await store.arrived(1)
    (snapshot,) = (await database.manifest()).snapshots
    assert snapshot.manifest_id == (await database.manifest()).manifest_id
    assert snapshot.snapshot_expire_time_s == await database.store.now_ms() // 1000 + 100
    store.let_go()
    opened = await opening
    assert snapshot.id == own(opened).nonce
    (snapshot,) = (await database.manifest()).snapshots
    assert snapshot.id == opened.held.snapshot_id


async def test_cancelled_opening_leaves_nothing_behind() -> None:
    """An opening that is cancelled anywhere ends at once, and the next one gets its turn."""
    for patience in range(40):
        database = await Database.created()
        opening = asyncio.create_task(database.open())
        for _ in range(patience):
            await asyncio.sleep(0)
        opening.cancel()
        await asyncio.wait([opening])
        await quiesce()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert contents(await database.open()) == []
