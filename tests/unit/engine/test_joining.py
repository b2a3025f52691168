"""How a replica begins, statement by statement of seed 000, and what protects it meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from shalekv.core.snapshot import find_snapshot
from shalekv.errors import (
    ObjectNotFound,
)
from shalekv.format import names
from tests.kit.engine.replica import (
    TTL_S,
    AskedStore,
    ReplicaGround,
    pass_s,
    scan,
)
from tests.kit.virtual_time import virtual_time


@virtual_time(seed=1)
async def test_joining_reads_the_manifest_before_the_log_and_is_protected() -> None:
    """The snapshot knows the last object before the first gap, and all up to it is shown."""
    ground = await ReplicaGround.created()
    await ground.put(a=b"1")
    await ground.put(b=b"1")
    ground.slot += 1  # a gap
    await ground.put(c=b"1")
    store = AskedStore(ground)
    engine = await ground.join(store)
    assert store.lists.index(names.MANIFEST_FOLDER) < store.lists.index(names.WAL_FOLDER)
    assert store.lists.count(names.WAL_FOLDER) == 1
    manifest = await ground.manifest()
    snapshot = find_snapshot(manifest, engine.held.snapshot_id)
    assert snapshot is not None
    assert snapshot.manifest_id == manifest.manifest_id
    assert manifest.wal_id_last_seen == 1
    assert await scan(engine) == [(b"a", b"1"), (b"b", b"1")]
    assert (engine.prefix.seq, engine.prefix.wal_id, engine.epoch) == (2, 1, 1)


@virtual_time(seed=1)
async def test_joining_begins_again_when_another_edit_came_first() -> None:
    """What was listed under an older manifest may be gone: the log is listed once more."""
    ground = await ReplicaGround.created()
    await ground.put(a=b"1")
    store = AskedStore(ground)

    async def compact_once(prefix: str) -> None:
        if prefix == names.WAL_FOLDER and store.lists.count(prefix) == 1:
            await ground.compact()

    store.before_list = compact_once
    engine = await ground.join(store)
    assert store.lists.count(names.WAL_FOLDER) == 2
    assert engine.held.tree.wal_id == 0
    assert engine.memtable.key_count == 0
    assert await scan(engine) == [(b"a", b"1")]
    assert engine.epoch == 1  # of object c, which the collector keeps for this


@virtual_time(seed=1)
async def test_snapshot_is_renewed_while_the_log_is_loaded() -> None:
    """A replay that lasts longer than a snapshot lives loses nothing."""
    ground = await ReplicaGround.created()
    for number in range(6):
        await ground.put(**{f"k{number}": b"1"})
    store = AskedStore(ground)

    async def slow(name: str) -> None:
        if name.startswith(names.WAL_FOLDER):
            await pass_s(TTL_S / 3)

    store.before_get = slow
    joining = asyncio.create_task(ground.join(store, reader_parallel_reads=1))
    await pass_s(TTL_S + 5)
    await ground.compact()
    await ground.collect()
    engine = await joining
    assert len(await scan(engine)) == 6
    assert engine.levels.lost_count == 0


@virtual_time(seed=1)
async def test_joining_fails_when_the_log_is_lost() -> None:
    """Without a snapshot what was listed may be deleted while it is read: join again."""
    ground = await ReplicaGround.created()
    for number in range(4):
        await ground.put(**{f"k{number}": b"1"})
    store = AskedStore(ground)

    async def compact_and_collect(name: str) -> None:
        if name == names.wal_name(0):
            await ground.compact()
            await ground.collect()

    store.before_get = compact_and_collect
    with pytest.raises(ObjectNotFound):
        await ground.join(store, snapshot="none", reader_parallel_reads=1)
    assert len(asyncio.all_tasks()) == 1
