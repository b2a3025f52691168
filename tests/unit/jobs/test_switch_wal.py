"""Switches of the WAL mode: no acknowledged write is lost, and no old writer goes on (CE15)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

import pytest

from shalekv.errors import DatabaseMismatch, Fenced, InvalidRequest, QuorumUnavailable, ShaleError
from shalekv.jobs.backup.plan import needed_slots
from shalekv.jobs.fsck.check import Fsck
from shalekv.jobs.switch_wal import switch_to_object_store, switch_to_quorum
from shalekv.protocol.manifest import Manifest, WalMode
from shalekv.settings import QuorumSettings, StoreSettings, WriterSettings
from shalekv.store.cas import CasStore
from shalekv.write.opening import open_log
from shalekv.write.recovery import RecoveredLog
from shalekv.write.snapshots import Snapshots
from tests.kit.engine.replica import scan
from tests.kit.quorum.log import TIMES, QuorumDatabase, Writing, runtime
from tests.kit.store import FaultyStore, MortalProcess, at_request
from tests.kit.virtual_time import virtual_time

FIRST, OTHERS = ["n1:1", "n2:1", "n3:1"], ["n4:1", "n5:1", "n6:1"]
REQUESTS_MAX = 200  # of one switch
NEVER_MS = 3_600_000

Switch = Callable[[CasStore], Awaitable[Manifest]]


async def _open(database: QuorumDatabase, store: CasStore | None = None) -> RecoveredLog:
    """Open the database for writing, in its current mode."""
    is_quorum = (await database.manifest()).wal_mode is WalMode.QUORUM
    return await open_log(
        store or database.cas(),
        WriterSettings(flush_interval_ms=0, fence_poll_ms=NEVER_MS, open_timeout_ms=NEVER_MS),
        address="",
        links=database.links() if is_quorum else None,
        quorum=QuorumSettings.model_validate(TIMES | {"archive_interval_ms": 100}),
    )


@asynccontextmanager
async def _writing(database: QuorumDatabase) -> AsyncIterator[Writing]:
    """Run a writer, which may be fenced meanwhile."""
    writing = Writing(await _open(database), database.links())
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(writing.run())
        try:
            yield writing
        finally:
            writing.engine.close()
            await running


async def _write(database: QuorumDatabase, *keys: bytes) -> None:
    """Write keys, and close the writer; with a quorum, not everything is archived."""
    async with _writing(database) as writing:
        for key in keys:
            await writing.put(key)


async def _to_object_store(database: QuorumDatabase, store: CasStore) -> Manifest:
    switched: list[Manifest] = []
    failures: list[ShaleError] = []
    async with asyncio.TaskGroup() as tasks:
        archiving = tasks.create_task(database.keep_archiving())
        try:
            switched.append(await switch_to_object_store(store, database.links()))
        except ShaleError as error:  # raised below, because the group would wrap it
            failures.append(error)
        archiving.cancel()
    for failure in failures:
        raise failure
    return switched[0]


async def _to_quorum(database: QuorumDatabase, addresses: list[str], store: CasStore) -> Manifest:
    return await switch_to_quorum(store, database.links(), addresses)


async def _keys(database: QuorumDatabase) -> set[bytes]:
    """Open the database in its current mode; return all keys."""
    return {key for key, _ in await scan(Writing(await _open(database), database.links()).engine)}


async def _check(database: QuorumDatabase, keys: set[bytes]) -> None:
    """Check that a writer of the current mode reads all keys, and that nothing is damaged or
    missing.
    """
    assert await _keys(database) == keys
    await _check_sound(database)


async def _check_sound(database: QuorumDatabase) -> None:
    fsck = Fsck(database.cas(), parallel=1, is_deep=True)
    assert [each async for each in fsck.findings() if each.kind.is_damage] == []
    manifest = await database.manifest()
    slots = needed_slots(manifest)
    assert not slots or slots[-1] in await database.wal()


@virtual_time(5)
async def test_a_database_goes_through_the_modes() -> None:
    """After switches to safekeepers, back, and to other safekeepers, everything written is there
    each time.
    """
    database = await QuorumDatabase.in_object_store()
    await _write(database, b"a")
    switched = await _to_quorum(database, FIRST, database.cas())
    assert switched.wal_mode is WalMode.QUORUM
    await Snapshots(database.cas()).create(ttl_ms=1_000)  # before anybody opens it
    await _check_sound(database)
    await _check(database, {b"a"})
    await _write(database, b"b", b"c")
    switched = await _to_object_store(database, database.cas())
    assert (switched.wal_mode, switched.wal_members) == (WalMode.OBJECT_STORE, ())
    assert not any(node.logs for node in database.nodes)
    await _check(database, set(b"a b c".split()))
    await _write(database, b"d")
    await _to_quorum(database, OTHERS, database.cas())
    await _write(database, b"e")
    await _check(database, set(b"a b c d e".split()))


async def _prepared(target: WalMode) -> tuple[QuorumDatabase, Switch]:
    """Create a database of the other mode with two keys; return it and the function that switches
    it.
    """
    if target is WalMode.QUORUM:
        database = await QuorumDatabase.in_object_store()
        switch: Switch = partial(_to_quorum, database, FIRST)
    else:
        database = await QuorumDatabase.created()
        switch = partial(_to_object_store, database)
    await _write(database, b"a", b"b")
    return database, switch


async def _put_until_refused(
    writing: Writing, acknowledged: set[bytes], beside: asyncio.Event
) -> None:
    """Write until a write is not acknowledged as durable."""
    number = 0
    while True:
        key = b"k%04d" % number
        try:
            outcome = await writing.write(key).outcome()
        except ShaleError:
            return
        if isinstance(outcome, ShaleError):
            return
        acknowledged.add(key)
        number += 1
        beside.set()


@pytest.mark.parametrize("target", [WalMode.QUORUM, WalMode.OBJECT_STORE])
@virtual_time(5)
async def test_the_writer_of_the_other_mode_is_fenced(target: WalMode) -> None:
    """A writer that serves during a switch ends; what it acknowledged is kept."""
    database, switch = await _prepared(target)
    acknowledged: set[bytes] = set()
    begun = asyncio.Event()
    async with _writing(database) as writing, asyncio.TaskGroup() as tasks:
        tasks.create_task(_put_until_refused(writing, acknowledged, begun))
        await begun.wait()
        assert (await switch(database.cas())).wal_mode is target
        after = len(acknowledged)
        await _write(database, b"new")
    assert len(acknowledged) == after
    assert isinstance(writing.ended_by, Fenced)
    found = await _keys(database)
    assert found >= acknowledged | {b"new"}
    await _check_sound(database)


@pytest.mark.parametrize("target", [WalMode.QUORUM, WalMode.OBJECT_STORE])
@virtual_time(1)
async def test_an_opening_that_crosses_a_switch_writes_nothing(target: WalMode) -> None:
    """An opener of the previous mode acknowledges nothing after a switch, at whichever of its
    requests the switch happens.
    """

    async def crosses(database: QuorumDatabase, switch: Switch, at: int, keys: set[bytes]) -> bool:
        """Open and write, add acknowledged keys to `keys`; return whether a switch happened."""
        switched: list[Manifest] = []

        async def cross() -> None:
            switched.append(await switch(database.cas()))

        store = FaultyStore(database.another_store(), before=at_request(at, cross))
        cas = CasStore(store, runtime(20_000 + at), StoreSettings())
        try:
            opened = await _open(database, cas)
        except (Fenced, DatabaseMismatch, QuorumUnavailable):
            return bool(switched)
        writing = Writing(opened, database.links())
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(writing.run())
            is_new_mode = (opened.safekeepers is not None) is (target is WalMode.QUORUM)
            was_switched = bool(switched) and not is_new_mode
            if not isinstance(await writing.write(b"late").outcome(), ShaleError):
                assert not was_switched
                keys.add(b"late")
            writing.engine.close()
        return bool(switched)

    for at in range(REQUESTS_MAX):
        database, switch = await _prepared(target)
        keys = {b"a", b"b"}
        if not await crosses(database, switch, at, keys):
            return
        assert (await database.manifest()).wal_mode is target
        found = await _keys(database)
        assert found >= keys
        await _check_sound(database)
    raise AssertionError("it never ends")


@pytest.mark.parametrize("is_archived", [True, False])
@pytest.mark.parametrize("target", [WalMode.QUORUM, WalMode.OBJECT_STORE])
@virtual_time(1)
async def test_an_opener_that_stalls_takes_nothing_from_the_log_after_a_switch(
    target: WalMode,
    is_archived: bool,  # noqa: FBT001 - a parameter
) -> None:
    """An opener that stalls at any request, and goes on after a writer of the new mode has
    acknowledged writes, takes no slot of the new log (CE17).

    What that writer has acknowledged is not in the archive yet; its fence may be.
    """
    for at in range(REQUESTS_MAX):
        database, switch = await _prepared(target)
        keys = {b"a", b"b"}

        async def switch_and_write(
            database: QuorumDatabase = database, switch: Switch = switch, keys: set[bytes] = keys
        ) -> None:
            await switch(database.cas())
            async with _writing(database) as writing:
                if is_archived and target is WalMode.QUORUM:
                    await writing.put(b"first")
                    await database.archive()
                await writing.put(b"last")
            keys |= {b"first", b"last"} if is_archived and target is WalMode.QUORUM else {b"last"}

        store = FaultyStore(database.another_store(), before=at_request(at, switch_and_write))
        with suppress(Fenced, DatabaseMismatch, QuorumUnavailable):
            await _open(database, CasStore(store, runtime(30_000 + at), StoreSettings()))
        if b"last" not in keys:
            return
        assert await _keys(database) == keys
        if target is WalMode.QUORUM:
            async with database.writing() as writing:
                await writing.put(b"after")
            assert writing.ended_by is None
            assert await _keys(database) == keys | {b"after"}
        await _check_sound(database)
    raise AssertionError("it never ends")


@pytest.mark.parametrize("target", [WalMode.QUORUM, WalMode.OBJECT_STORE])
@virtual_time(1)
async def test_a_switch_that_dies_leaves_one_of_the_modes(target: WalMode) -> None:
    """After a switch that dies at any request, the database opens in one of the modes with
    everything acknowledged; run again, the switch completes and nothing is lost.
    """

    async def dies(database: QuorumDatabase, switch: Switch, at: int) -> bool:
        process = MortalProcess(at)
        store = process.store(database.another_store())
        work = switch(CasStore(store, runtime(10_000 + at), StoreSettings()))
        return not await process.run(work)

    modes = set()
    for at in range(REQUESTS_MAX):
        database, switch = await _prepared(target)
        has_died = await dies(database, switch, at)
        mode = (await database.manifest()).wal_mode
        await _write(database, b"c")
        if mode is target:
            with pytest.raises(DatabaseMismatch, match="already"):
                await switch(database.cas())
        else:
            assert (await switch(database.cas())).wal_mode is target
        await _check(database, {b"a", b"b", b"c"})
        modes.add(mode)
        if not has_died:
            break
    else:
        raise AssertionError("it never ends")
    assert len(modes) == 2


@virtual_time(1)
async def test_what_cannot_be_switched_is_left_as_it_is() -> None:
    """A switch with a node that does not answer, with too few nodes, or with an archive that makes
    no progress changes nothing.
    """
    database = await QuorumDatabase.in_object_store()
    before = await database.manifest()
    database.nodes["n2:1"].stop()
    with pytest.raises(QuorumUnavailable, match="n2:1 does not answer"):
        await _to_quorum(database, FIRST, database.cas())
    for addresses in ([], ["n1:1", "n1:1"]):
        with pytest.raises(InvalidRequest):
            await _to_quorum(database, addresses, database.cas())
    assert await database.manifest() == before
    with pytest.raises(DatabaseMismatch, match="object-store already"):
        await switch_to_object_store(database.cas(), database.links())

    database = await QuorumDatabase.created()
    await _write(database, b"a")
    with pytest.raises(QuorumUnavailable, match="archived nothing for 60 s"):
        await switch_to_object_store(database.cas(), database.links())
    assert (await database.manifest()).wal_mode is WalMode.QUORUM
    await _check(database, {b"a"})
