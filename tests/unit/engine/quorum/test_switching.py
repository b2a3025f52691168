"""Switches of the WAL mode: nothing acknowledged is lost, and no old writer goes on (CE15)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest

from shalekv.core.manifest import Manifest, WalMode
from shalekv.engine.fsck.check import Fsck
from shalekv.engine.opened_log import OpenedLog
from shalekv.engine.quorum.switching import switch_to_object_store, switch_to_quorum
from shalekv.engine.recover import open_log
from shalekv.errors import DatabaseMismatch, Fenced, InvalidRequest, QuorumUnavailable, ShaleError
from shalekv.settings import QuorumSettings, StoreSettings, WriterSettings
from shalekv.store.cas import CasStore
from tests.kit.engine.databases import Database, contents
from tests.kit.quorum.log import (
    TIMES,
    Ground,
    Writing,
    runtime,
)
from tests.kit.quorum.nodes import Nodes
from tests.kit.store import FaultyStore, MortalProcess, at_request
from tests.kit.virtual_time import virtual_time

FIRST, OTHERS = ["n1:1", "n2:1", "n3:1"], ["n4:1", "n5:1", "n6:1"]
REQUESTS_MAX = 200  # of one switch
NEVER_MS = 3_600_000

Switch = Callable[[CasStore], Awaitable[Manifest]]


async def _object_store_ground() -> Ground:
    """A database with its WAL in the object store, and six nodes that have nothing of it."""
    database = await Database.created()
    return Ground(database, Nodes(6), (await database.manifest()).database_id)


async def _open(ground: Ground, store: CasStore | None = None) -> OpenedLog:
    """Open it for writing, in whichever mode it is."""
    is_quorum = (await ground.database.manifest()).wal_mode is WalMode.QUORUM
    return await open_log(
        store or ground.cas(),
        WriterSettings(flush_interval_ms=0, fence_poll_ms=NEVER_MS),
        address="",
        links=ground.links() if is_quorum else None,
        quorum=QuorumSettings.model_validate(TIMES | {"archive_interval_ms": 100}),
    )


@asynccontextmanager
async def _writing(ground: Ground) -> AsyncIterator[Writing]:
    """A writer that runs; it may be fenced meanwhile."""
    writing = Writing(await _open(ground), ground.links())
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(writing.run())
        try:
            yield writing
        finally:
            writing.engine.close()
            await running


async def _write(ground: Ground, *keys: bytes) -> None:
    """Acknowledged writes of a writer that closes; of a quorum not all of it is archived."""
    async with _writing(ground) as writing:
        for key in keys:
            await writing.put(key)


async def _to_object_store(ground: Ground, store: CasStore) -> Manifest:
    switched: list[Manifest] = []
    failures: list[ShaleError] = []
    async with asyncio.TaskGroup() as tasks:
        archiving = tasks.create_task(ground.keep_archiving())
        try:
            switched.append(await switch_to_object_store(store, ground.links()))
        except ShaleError as error:  # raised below, because the group would wrap it
            failures.append(error)
        archiving.cancel()
    for failure in failures:
        raise failure
    return switched[0]


async def _to_quorum(ground: Ground, addresses: list[str], store: CasStore) -> Manifest:
    return await switch_to_quorum(store, ground.links(), addresses)


async def _check(ground: Ground, keys: set[bytes]) -> None:
    """All of it is read, by a writer of the present mode; nothing is damaged or missing."""
    assert {key for key, _ in contents(await _open(ground))} == keys
    await _check_sound(ground)


async def _check_sound(ground: Ground) -> None:
    fsck = Fsck(ground.cas(), parallel=1, is_deep=True)
    assert [each async for each in fsck.findings() if each.kind.is_damage] == []
    last_seen = (await ground.database.manifest()).wal_id_last_seen
    assert last_seen is None or last_seen in await ground.database.wal()


@virtual_time(5)
async def test_a_database_goes_through_the_modes() -> None:
    """To safekeepers, back, and to other safekeepers: all that was written is there each time."""
    ground = await _object_store_ground()
    await _write(ground, b"a")
    switched = await _to_quorum(ground, FIRST, ground.cas())
    assert switched.wal_mode is WalMode.QUORUM
    await _check(ground, {b"a"})
    await _write(ground, b"b", b"c")
    switched = await _to_object_store(ground, ground.cas())
    assert (switched.wal_mode, switched.wal_members) == (WalMode.OBJECT_STORE, ())
    assert not any(node.logs for node in ground.nodes)
    await _check(ground, set(b"a b c".split()))
    await _write(ground, b"d")
    await _to_quorum(ground, OTHERS, ground.cas())
    await _write(ground, b"e")
    await _check(ground, set(b"a b c d e".split()))


async def _prepared(target: WalMode) -> tuple[Ground, Switch]:
    """A database of the other mode that holds two keys, and what switches it."""
    if target is WalMode.QUORUM:
        ground = await _object_store_ground()
        switch: Switch = partial(_to_quorum, ground, FIRST)
    else:
        ground = await Ground.created()
        switch = partial(_to_object_store, ground)
    await _write(ground, b"a", b"b")
    return ground, switch


async def _put_until_refused(writing: Writing, told: set[bytes], beside: asyncio.Event) -> None:
    """Write on until something else is told than that it is durable."""
    number = 0
    while True:
        key = b"k%04d" % number
        try:
            outcome = await writing.write(key).outcome()
        except ShaleError:
            return
        if isinstance(outcome, ShaleError):
            return
        told.add(key)
        number += 1
        beside.set()


@pytest.mark.parametrize("target", [WalMode.QUORUM, WalMode.OBJECT_STORE])
@virtual_time(5)
async def test_the_writer_of_the_other_mode_is_fenced(target: WalMode) -> None:
    """It serves while it is switched: what it acknowledged is kept, and then it ends."""
    ground, switch = await _prepared(target)
    told: set[bytes] = set()
    begun = asyncio.Event()
    async with _writing(ground) as writing, asyncio.TaskGroup() as tasks:
        tasks.create_task(_put_until_refused(writing, told, begun))
        await begun.wait()
        assert (await switch(ground.cas())).wal_mode is target
        after = len(told)
        await _write(ground, b"new")
    assert len(told) == after
    assert isinstance(writing.ended_by, Fenced)
    found = {key for key, _ in contents(await _open(ground))}
    assert found >= told | {b"new"}
    await _check_sound(ground)


@pytest.mark.parametrize("target", [WalMode.QUORUM, WalMode.OBJECT_STORE])
@virtual_time(1)
async def test_an_opening_that_crosses_a_switch_writes_nothing(target: WalMode) -> None:
    """Wherever a switch comes between, who opened in the mode before acknowledges nothing after."""

    async def crosses(ground: Ground, switch: Switch, at: int, keys: set[bytes]) -> bool:
        """Open and write, and tell in `keys` if that was acknowledged; whether it was switched."""
        switched: list[Manifest] = []

        async def cross() -> None:
            switched.append(await switch(ground.cas()))

        store = FaultyStore(ground.database.another_store(), before=at_request(at, cross))
        cas = CasStore(store, runtime(20_000 + at), StoreSettings())
        try:
            opened = await _open(ground, cas)
        except (Fenced, DatabaseMismatch, QuorumUnavailable):
            return bool(switched)
        writing = Writing(opened, ground.links())
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(writing.run())
            is_new_mode = opened.slots.is_quorum is (target is WalMode.QUORUM)
            was_switched = bool(switched) and not is_new_mode
            if not isinstance(await writing.write(b"late").outcome(), ShaleError):
                assert not was_switched
                keys.add(b"late")
            writing.engine.close()
        return bool(switched)

    for at in range(REQUESTS_MAX):
        ground, switch = await _prepared(target)
        keys = {b"a", b"b"}
        if not await crosses(ground, switch, at, keys):
            return
        assert (await ground.database.manifest()).wal_mode is target
        found = {key for key, _ in contents(await _open(ground))}
        assert found >= keys
        await _check_sound(ground)
    raise AssertionError("it never ends")


@pytest.mark.parametrize("target", [WalMode.QUORUM, WalMode.OBJECT_STORE])
@virtual_time(1)
async def test_a_switch_that_dies_leaves_one_of_the_modes(target: WalMode) -> None:
    """Wherever it dies, the database opens in one of them with all that was acknowledged; run
    again it ends, and nothing is lost by that.
    """

    async def dies(ground: Ground, switch: Switch, at: int) -> bool:
        process = MortalProcess(at)
        store = process.store(ground.database.another_store())
        work = switch(CasStore(store, runtime(10_000 + at), StoreSettings()))
        return not await process.run(work)

    modes = set()
    for at in range(REQUESTS_MAX):
        ground, switch = await _prepared(target)
        has_died = await dies(ground, switch, at)
        mode = (await ground.database.manifest()).wal_mode
        await _write(ground, b"c")
        if mode is target:
            with pytest.raises(DatabaseMismatch, match="already"):
                await switch(ground.cas())
        else:
            assert (await switch(ground.cas())).wal_mode is target
        await _check(ground, {b"a", b"b", b"c"})
        modes.add(mode)
        if not has_died:
            break
    else:
        raise AssertionError("it never ends")
    assert len(modes) == 2


@virtual_time(1)
async def test_what_cannot_be_switched_is_left_as_it_is() -> None:
    """A node that does not answer, too few of them, and an archive that does not come."""
    ground = await _object_store_ground()
    before = await ground.database.manifest()
    ground.nodes["n2:1"].stop()
    with pytest.raises(QuorumUnavailable, match="n2:1 does not answer"):
        await _to_quorum(ground, FIRST, ground.cas())
    for addresses in ([], ["n1:1", "n1:1"]):
        with pytest.raises(InvalidRequest):
            await _to_quorum(ground, addresses, ground.cas())
    assert await ground.database.manifest() == before
    with pytest.raises(DatabaseMismatch, match="object-store already"):
        await switch_to_object_store(ground.cas(), ground.links())

    ground = await Ground.created()
    await _write(ground, b"a")
    with pytest.raises(QuorumUnavailable, match="archived nothing for 60 s"):
        await switch_to_object_store(ground.cas(), ground.links())
    assert (await ground.database.manifest()).wal_mode is WalMode.QUORUM
    await _check(ground, {b"a"})
