"""The stored manifest: which one is current, when an edit counts, and what a large one costs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import TypeVar, TypeVarTuple

import pytest

from shalekv.clock import LoopClock
from shalekv.errors import (
    DatabaseNotFound,
    IllegalState,
    ObjectNotFound,
    WrongObject,
)
from shalekv.format import names
from shalekv.format.manifest import encode_manifest
from shalekv.protocol.manifest import Manifest, Snapshot
from shalekv.protocol.sst_table import SstTable
from shalekv.runtime import Runtime, ThreadWorkers
from shalekv.settings import StoreSettings
from shalekv.store.api import Created, ObjectStore, StoredObject
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest
from shalekv.store.memory import MemoryStore
from tests.kit.engine.databases import Database
from tests.kit.engine.running_log import quiesce, yielding_runtime
from tests.kit.manifests import some_info
from tests.kit.store import FaultyStore, HeldStore, Request


def stored_in(store: ObjectStore) -> StoredManifest:
    """The manifest in `store`, before the first read."""
    return StoredManifest(CasStore(store, yielding_runtime(), StoreSettings()))


def raised_epoch(manifest: Manifest) -> Manifest:
    return replace(manifest, compactor_epoch=manifest.compactor_epoch + 1)


async def test_nothing_there_is_no_database() -> None:
    """An empty folder is an error that says so, and so is `current` before the first read."""
    stored = stored_in(Database().store)
    with pytest.raises(DatabaseNotFound, match="no manifest"):
        await stored.refresh()
    with pytest.raises(DatabaseNotFound):
        _ = stored.current


@pytest.mark.parametrize("empty_lists", [1, 2])
async def test_two_lists_show_that_a_database_was_deleted(empty_lists: int) -> None:
    """One empty list of a database that existed does not end its use; a second one does."""
    database = await Database.created()
    left = 0

    async def hide(request: Request) -> None:
        nonlocal left
        left -= request.operation == "list"
        store.hidden = {names.manifest_name(0)} if left >= 0 else set()

    store = FaultyStore(database.store, before=hide)
    stored = stored_in(store)
    before = await stored.refresh()
    left = empty_lists
    if empty_lists == 1:
        assert await stored.refresh() == before
        return
    with pytest.raises(DatabaseNotFound, match="was deleted"):
        await stored.refresh()


async def test_manifest_of_another_database_is_reported() -> None:
    """A manifest with a higher id that belongs to another database is an error."""
    database = await Database.created()
    stored = stored_in(database.store)
    await stored.refresh()
    await database.edit(lambda manifest: replace(manifest, database_id=b"x" * 16))
    with pytest.raises(WrongObject, match="belongs to the database 7878"):
        await stored.refresh()


async def test_state_that_went_back_is_reported() -> None:
    """A process that has seen a later state than the manifest shows now stops: an older state was
    put in place of the database.
    """
    database = await Database.created()
    stored = stored_in(database.store)
    await database.edit(lambda m: replace(m, wal_id_last_compacted=7, last_compacted_seq=40))
    await stored.refresh()
    await database.edit(lambda m: replace(m, wal_id_last_compacted=5, last_compacted_seq=30))
    with pytest.raises(IllegalState, match="an older state was put in place"):
        await stored.refresh()
    assert stored.current.last_compacted_seq == 40


@pytest.mark.parametrize("is_replaced", [True, False])
async def test_listed_manifest_is_gone(*, is_replaced: bool) -> None:
    """If a listed manifest was collected, there is a newer one, and the process lists again. A
    store that lists a manifest repeatedly without having it is not asked forever.
    """
    database = await Database.created()

    async def vanish(request: Request) -> None:
        if request.operation == "get" and request.name == names.manifest_name(0):
            if is_replaced:
                await database.edit(raised_epoch)
            raise ObjectNotFound(store.url, "get", request.name, "collected")

    store = FaultyStore(database.store, before=vanish)
    if is_replaced:
        assert (await stored_in(store).refresh()).manifest_id == 1
        return
    with pytest.raises(ObjectNotFound):
        await stored_in(store).refresh()


async def test_edit_that_another_followed_counts_if_it_is_contained() -> None:
    """If the own manifest is no longer the highest, the current one shows whether the edit counts
    (F2).
    """
    database = await Database.created()
    store = HeldStore(database.objects, folder=names.MANIFEST_FOLDER)
    stored = stored_in(store)
    editing = asyncio.create_task(stored.edit(raised_epoch, lambda m: m.compactor_epoch >= 1))
    held = await store.arrived(1)
    held.apply()
    following = await database.edit(lambda m: replace(m, writer_address="there:1"))
    held.lose_request()  # the store has the object, and our process finds that out by reading
    edited = await editing
    assert edited == following
    assert edited.manifest_id == 2


@pytest.mark.parametrize("in_seconds", [False, True], ids=["milliseconds", "seconds"])
async def test_manifest_that_was_made_anew_since_the_list_is_not_read(*, in_seconds: bool) -> None:
    """A manifest that a stalled process creates in the place of a collected one is not used (F2). A
    store whose replies to reads have whole seconds is not mistaken for such a case.
    """
    database = await Database.created()
    await database.edit(raised_epoch)
    store = Recycling(database, in_seconds=in_seconds)
    assert (await stored_in(store).refresh()).manifest_id == 1
    assert store.gets == 1
    store.then_recycle = True
    found = await stored_in(store).refresh()
    assert (found.manifest_id, found.compactor_epoch) == (3, 3)


class Recycling(MemoryStore):
    """Reads take so long that others can continue and collect, and a stalled process can create
    again.
    """

    def __init__(self, database: Database, *, in_seconds: bool) -> None:
        self.reported_now_ms = 1_500
        super().__init__(lambda: self.reported_now_ms, objects=database.objects)
        self.database = database
        self.in_seconds = in_seconds
        self.then_recycle = False
        self.gets = 0

    async def get(self, name: str) -> StoredObject:
        self.gets += 1
        if self.then_recycle:
            self.then_recycle = False
            stale = replace(await self.database.manifest(), compactor_epoch=70)
            for _ in range(2):
                await self.database.edit(raised_epoch)
            await self.database.remove(*(names.manifest_name(number) for number in range(3)))
            self.reported_now_ms += 10_000
            await self.create(name, encode_manifest(stale))
        found = await super().get(name)
        reported_ms = found.info.modified_ms - found.info.modified_ms % (
            1_000 if self.in_seconds else 1
        )
        return replace(found, info=replace(found.info, modified_ms=reported_ms))


async def test_edit_at_a_recycled_id_does_not_count() -> None:
    """A manifest created in the place of a collected one is no success: the edit is
    repeated (F2).
    """
    database = await Database.created()
    store = HeldStore(database.objects, folder=names.MANIFEST_FOLDER)
    stored = stored_in(store)
    editing = asyncio.create_task(
        stored.edit(
            lambda m: replace(m, writer_address="ours:1"), lambda m: m.writer_address == "ours:1"
        )
    )
    held = await store.arrived(1)
    for _ in range(3):
        await database.edit(raised_epoch)
    await database.remove(*(names.manifest_name(number) for number in range(3)))
    held.release()  # creates manifest 1 a second time
    (await store.arrived(2)).release()
    edited = await editing
    assert database.data(names.manifest_name(1)) == held.data
    assert (edited.manifest_id, edited.compactor_epoch, edited.writer_address) == (4, 3, "ours:1")


async def test_an_overtaken_read_does_not_go_back() -> None:
    """A read that a newer one overtakes does not make the older manifest current again."""
    database = await Database.created()
    await database.edit(raised_epoch)
    asked, answer = asyncio.Event(), asyncio.Event()

    async def hold_first(request: Request) -> None:
        if request.operation == "get" and not asked.is_set():
            asked.set()
            await answer.wait()

    stored = stored_in(FaultyStore(database.store, after=hold_first))
    slow = asyncio.create_task(stored.refresh())
    await asked.wait()
    newest = await database.edit(raised_epoch)
    assert await stored.refresh() == newest
    answer.set()
    assert await slow == newest
    assert stored.current == newest


async def test_edit_may_give_up() -> None:
    """An error that the edit raises for the manifest that it gets is raised, and nothing is
    written.
    """
    database = await Database.created()

    def refuse(_: Manifest) -> Manifest:
        raise DatabaseNotFound("given up")

    with pytest.raises(DatabaseNotFound, match="given up"):
        await stored_in(database.store).edit(refuse, lambda _: True)
    await quiesce()
    assert (await database.manifest()).manifest_id == 0
    assert encode_manifest(await database.manifest()) == database.data(names.manifest_name(0))


T = TypeVar("T")
Ts = TypeVarTuple("Ts")

SST_COUNT = 100_000
SNAPSHOT_COUNT = 1_000


class WatchedWorkers(ThreadWorkers):
    """Threads that record the functions that run in them."""

    def __init__(self) -> None:
        super().__init__(1)
        self.ran: list[str] = []

    async def run(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        def noted(*values: *Ts) -> T:
            assert threading.current_thread() is not threading.main_thread()
            self.ran.append(function.__name__)
            return function(*values)

        return await super().run(noted, *args)


def large_manifest(random: Random) -> Manifest:
    """A manifest of full size with keys of about 32 bytes."""
    keys = sorted({random.randbytes(32) for _ in range(SST_COUNT + 1)})
    infos = (
        replace(
            some_info(1),
            id=random.randbytes(6) + b"\x70" + bytes(1) + b"\x80" + random.randbytes(7),
            first_key=keys[i],
            last_key=keys[i + 1],
            checksum=random.getrandbits(32),
        )
        for i in range(SST_COUNT)
    )
    snapshots = tuple(
        Snapshot(id=random.randbytes(16), manifest_id=0, snapshot_expire_time_s=1)
        for _ in range(SNAPSHOT_COUNT)
    )
    return Manifest(
        database_id=random.randbytes(16),
        manifest_id=0,
        write_id=random.randbytes(16),
        leveled_ssts=SstTable.from_infos(infos),
        snapshots=snapshots,
    )


async def test_a_large_manifest_is_edited_by_four_requests_and_off_the_loop() -> None:
    """An edit costs list, get, create and list; encoding and decoding run in workers."""
    random = Random(1)
    store = FaultyStore(MemoryStore(lambda: 0, name="large"))
    data = encode_manifest(large_manifest(random))
    assert await store.create(names.manifest_name(0), data) == Created()
    store.requests.clear()
    workers = WatchedWorkers()
    runtime = Runtime(LoopClock(), random, workers)
    stored = StoredManifest(CasStore(store, runtime, StoreSettings()))
    added = Snapshot(id=random.randbytes(16), manifest_id=1, snapshot_expire_time_s=2)

    edited = await stored.edit(
        lambda m: replace(m, snapshots=(*m.snapshots, added)), lambda m: added in m.snapshots
    )
    workers.close()

    asked = [each.operation for each in store.requests]
    assert asked == ["list", "get", "create", "list"]
    assert workers.ran == ["decode_manifest", "encode_manifest"]
    assert len(edited.leveled_ssts) == SST_COUNT
    assert edited.snapshots[-1] == added
