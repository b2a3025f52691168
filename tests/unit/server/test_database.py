"""Creation of a database."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from shalekv.errors import (
    DatabaseExists,
    DatabaseMismatch,
    IllegalState,
    InvalidRequest,
    QuorumUnavailable,
)
from shalekv.format import names
from shalekv.protocol.manifest import WalMode
from shalekv.protocol.membership import Configuration, begin_change
from shalekv.server.database import Quorum, check_wal_mode, complete_creation, create_database
from shalekv.settings import DatabaseSettings, StoreSettings
from shalekv.store.cas import CasStore
from tests.kit.engine.databases import Database
from tests.kit.quorum.links import InProcessLinks
from tests.kit.quorum.nodes import Nodes
from tests.kit.store import HeldStore


async def test_new_database_has_one_manifest() -> None:
    """A new database is manifest 0, with an id of its own and the store's time."""
    first, second = await Database.created(1), await Database.created(2)
    manifest = await first.manifest()
    assert (manifest.manifest_id, manifest.writer_epoch) == (0, 0)
    assert manifest.logical_time_ms == await first.store.now_ms()
    assert manifest.database_id != (await second.manifest()).database_id


async def test_database_is_created_once() -> None:
    """Nothing is created where any manifest exists: the first one may have been collected."""
    database = await Database.created()
    with pytest.raises(DatabaseExists):
        await create_database(database.store, database.runtime(), StoreSettings())
    await database.edit(lambda manifest: manifest)
    await database.remove(names.manifest_name(0))
    with pytest.raises(DatabaseExists):
        await create_database(database.store, database.runtime(), StoreSettings())


@pytest.mark.parametrize("is_collected", [False, True])
async def test_rival_creates_first(is_collected: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """The later of two creators fails, even if manifest 0 was collected meanwhile (F2)."""
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
    """Where there is a log without a manifest, creation fails, and the log is left as it is."""
    database = Database()
    await database.store.create(names.wal_name(3), b"of another database")
    with pytest.raises(IllegalState, match=names.wal_name(3)):
        await create_database(database.store, database.runtime(), StoreSettings())
    assert [info async for info in database.store.list(names.MANIFEST_FOLDER)] == []


ADDRESSES = ("n1:1", "n2:1", "n3:1")


async def created_with(nodes: Nodes, addresses: tuple[str, ...] = ADDRESSES) -> Database:
    database = Database()
    quorum = Quorum(InProcessLinks(nodes), addresses)
    await create_database(database.store, database.runtime(), StoreSettings(), quorum)
    return database


async def check(database: Database, **wanted: Any) -> None:
    """Compare the wanted settings with the manifest."""
    settings = DatabaseSettings.model_validate({"url": database.store.url} | wanted)
    await check_wal_mode(database.store, database.runtime(), StoreSettings(), settings)


async def test_safekeepers_create_logs_for_a_new_database() -> None:
    """The first manifest names each safekeeper by the member id that it has drawn."""
    nodes = Nodes()
    manifest = await (await created_with(nodes)).manifest()
    assert (manifest.wal_mode, manifest.wal_generation) == (WalMode.QUORUM, 1)
    members = Configuration.of(manifest).members
    logs = [node.log(manifest.database_id) for node in nodes]
    assert [each.id for each in members] == [each.state.member_id for each in logs]
    assert tuple(each.address for each in members) == ADDRESSES


async def test_invalid_quorums_are_refused() -> None:
    """An even number of safekeepers, a duplicate and an unreachable one are refused."""
    nodes = Nodes()
    with pytest.raises(InvalidRequest, match="odd number"):
        await created_with(nodes, ADDRESSES[:2])
    assert not any(node.logs for node in nodes)
    with pytest.raises(InvalidRequest, match="twice"):
        await created_with(nodes, (*ADDRESSES[:2], ADDRESSES[0]))
    nodes["n3:1"].stop()
    with pytest.raises(QuorumUnavailable, match="n3:1"):
        await created_with(nodes)
    assert not any(node.logs for node in nodes)  # an admitted member has released its space


def held_creation(database: Database, nodes: Nodes) -> tuple[HeldStore, asyncio.Task[None]]:
    """A creation in progress, and the store that holds its edits of the manifest."""
    store = HeldStore(database.objects, folder=names.MANIFEST_FOLDER)
    quorum = Quorum(InProcessLinks(nodes), ADDRESSES)
    creation = create_database(store, database.runtime(), StoreSettings(), quorum)
    return store, asyncio.create_task(creation)


async def complete(database: Database, nodes: Nodes) -> None:
    """Complete a creation, as a process does that finds the database already created."""
    cas = CasStore(database.another_store(), database.runtime(), StoreSettings())
    await complete_creation(cas, InProcessLinks(nodes))


async def test_logs_are_removed_when_another_creates_first() -> None:
    """The later of two creators fails, and its safekeepers keep no logs for it."""
    database, nodes = Database(), Nodes()
    store, creating = held_creation(database, nodes)
    held = await store.arrived(1)
    assert all(node.logs for node in nodes)
    await create_database(database.store, database.runtime(), StoreSettings())
    held.release()
    with pytest.raises(DatabaseExists):
        await creating
    assert not any(node.logs for node in nodes)
    assert (await database.manifest()).wal_mode is WalMode.OBJECT_STORE


@pytest.mark.parametrize("dies", [False, True])
async def test_a_slow_creation_admits_its_members_again(dies: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """A slow creation names the members that exist when it ends; if it dies before that, the next
    start does so.
    """
    database, nodes = Database(), Nodes()
    store, creating = held_creation(database, nodes)
    held = await store.arrived(1)
    nodes["n1:1"].wipe()
    held.release()
    await store.arrived(2)
    if dies:
        creating.cancel()
        await asyncio.wait([creating])
        await complete(database, nodes)
    else:
        store.release_all()
        await creating
    manifest = await database.manifest()
    logs = [node.log(manifest.database_id) for node in nodes]
    members = Configuration.of(manifest).members
    assert [each.id for each in members] == [each.state.member_id for each in logs]
    await complete(database, nodes)
    assert await database.manifest() == manifest  # it is complete


async def test_a_database_that_was_opened_keeps_its_members() -> None:
    """A slow creation changes no members once a writer has opened the database."""
    database, nodes = Database(), Nodes()
    store, creating = held_creation(database, nodes)
    held = await store.arrived(1)
    nodes["n1:1"].wipe()
    held.release()
    edit = await store.arrived(2)
    await database.edit(lambda manifest: replace(manifest, writer_epoch=1))
    before = await database.manifest()
    await complete(database, nodes)
    edit.release()
    with pytest.raises(InvalidRequest, match="a writer has opened"):
        await creating
    assert await database.manifest() == before


async def test_mode_is_compared_if_it_is_named() -> None:
    """A database in another WAL mode than the given one is refused, and both modes are named."""
    in_bucket, in_quorum = await Database.created(), await created_with(Nodes())
    await check(in_bucket)
    await check(in_bucket, wal="object-store")
    with pytest.raises(DatabaseMismatch, match="mode object-store, not in mode quorum"):
        await check(in_bucket, wal="quorum")
    await check(in_quorum)
    await check(in_quorum, wal="quorum")
    with pytest.raises(DatabaseMismatch, match="mode quorum, not in mode object-store"):
        await check(in_quorum, wal="object-store")


async def test_safekeepers_are_compared_if_they_are_named() -> None:
    """Safekeepers are accepted in any order, the present or the next ones; others are refused."""
    database = await created_with(Nodes())
    await check(database, wal="quorum", safekeepers="n3:1, n1:1,n2:1")
    with pytest.raises(DatabaseMismatch, match="n1:1,n2:1,n3:1"):
        await check(database, wal="quorum", safekeepers="n1:1,n2:1,n4:1")
    first, second, third = Configuration.of(await database.manifest()).members
    new = (first, second, third._replace(id=b"4" * 16, address="n4:1"))
    await database.edit(lambda manifest: begin_change(manifest, new))
    await check(database, wal="quorum", safekeepers="n1:1,n2:1,n4:1")
    await check(database, wal="quorum", safekeepers="n1:1,n2:1,n3:1")


def test_safekeepers_need_their_mode_and_addresses() -> None:
    """Contradicting settings are refused before any request."""
    for wanted in (
        {"safekeepers": "a:1,b:1,c:1"},
        {"wal": "object-store", "safekeepers": "a:1,b:1,c:1"},
        {"wal": "quorum", "safekeepers": "a:1,b,c:1"},
        {"wal": "quorum", "safekeepers": "a:1,b:0,c:1"},
        {"wal": "both"},
    ):
        with pytest.raises(ValueError, match=r"safekeepers|wal"):
            DatabaseSettings.model_validate({"url": "memory://x"} | wanted)
