"""Creating a database."""

from __future__ import annotations

import asyncio

import pytest

from shalekv.errors import DatabaseExists, IllegalState
from shalekv.format import names
from shalekv.roles.database import create_database
from shalekv.settings import StoreSettings
from tests.unit.engine.databases import Database
from tests.unit.engine.held_store import HeldStore


async def test_new_database_has_one_manifest() -> None:
    """A new database is manifest 0, with an id of its own and the store's time."""
    first, second = await Database.created(1), await Database.created(2)
    manifest = await first.manifest()
    assert (manifest.manifest_id, manifest.writer_epoch) == (0, 0)
    assert manifest.logical_time_ms == await first.store.now_ms()
    assert manifest.database_id != (await second.manifest()).database_id


async def test_database_is_created_once() -> None:
    """Where any manifest is, nothing is created: the first one may have been collected."""
    database = await Database.created()
    with pytest.raises(DatabaseExists):
        await create_database(database.store, database.runtime(), StoreSettings())
    await database.edit(lambda manifest: manifest)
    await database.remove(names.manifest_name(0))
    with pytest.raises(DatabaseExists):
        await create_database(database.store, database.runtime(), StoreSettings())


@pytest.mark.parametrize("is_collected", [False, True])
async def test_rival_creates_first(is_collected: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """Of two who create, the later one is told, even if manifest 0 was collected meanwhile (F2)."""
    database = Database()
    store = HeldStore(database.objects, folder=names.MANIFEST_FOLDER)
    creating = asyncio.create_task(create_database(store, database.runtime(), StoreSettings()))
    held = await store.arrived(1)
    await create_database(database.store, database.runtime(), StoreSettings())
    first = await database.manifest()
    if is_collected:
        await database.edit(lambda manifest: manifest)
        await database.remove(names.manifest_name(0))
    held.release()
    with pytest.raises(DatabaseExists):
        await creating
    assert (await database.manifest()).database_id == first.database_id


async def test_nothing_is_created_on_a_log_without_manifests() -> None:
    """Where a log is but no manifest, the manifests are lost: the log is left as it is."""
    database = Database()
    await database.store.create(names.wal_name(3), b"of another database")
    with pytest.raises(IllegalState, match=names.wal_name(3)):
        await create_database(database.store, database.runtime(), StoreSettings())
    assert [info async for info in database.store.list(names.MANIFEST_FOLDER)] == []
