"""What stops an archiver, and what it only waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from dataclasses import replace

import pytest

from shalekv.core.manifest import CasMode
from shalekv.core.quorum.messages import Health
from shalekv.errors import DatabaseMismatch, IllegalState, StoreBroken, StoreRefused
from shalekv.format import names
from shalekv.format.manifest import encode_manifest
from shalekv.runtime import Runtime
from shalekv.store.memory import MemoryStore
from tests.kit.quorum.held_log import (
    DEADLINE_S,
    EAGER,
    PATIENT,
    A,
    B,
    C,
    HeldLog,
    Written,
    archiver_of,
    listed,
    looked,
    manifest_of,
    put_manifest,
    running,
)
from tests.kit.store import FaultyStore, HeldStore, nothing


async def ended(run: Awaitable[None]) -> BaseException | None:
    """What it has raised."""
    try:
        await run
    except StoreBroken as error:
        return error
    return None


async def test_other_bytes_stop_the_archiver(store: MemoryStore, runtime: Runtime) -> None:
    """What is there is not touched, nothing more is archived or trimmed, and the status says so."""
    foreign = Written(epoch=2)
    foreign.write("0.1.")
    await store.create(names.wal_name(1), foreign.object(1))
    written, log = Written(), HeldLog(appointed=A)
    log.append(written.write("0."), committed_lsn=1)
    # It looks once, and meets the other object when it uploads its own.
    settings = EAGER.model_copy(update={"archive_look_interval_ms": 3_600_000})
    archiver = archiver_of(log, store, runtime, settings)
    async with running(archiver):
        await log.reached(archived=0)
        log.append(written.write("1."), committed_lsn=2)
        assert names.wal_name(1) in await log.archiving.told(problem=True)
        log.append(written.write("2.3."), committed_lsn=4)
    assert isinstance(archiver.alarm, IllegalState)
    assert log.archiving.problem == str(archiver.alarm)
    assert not log.archiving.is_archiver
    assert await listed(store) == [0, 1]
    assert (await store.get(names.wal_name(1))).data == foreign.object(1)
    assert log.trims == []


async def test_what_others_have_archived_is_compared(store: MemoryStore, runtime: Runtime) -> None:
    """One that only trims does not trust names: another object in the place is an alarm, too."""
    foreign = Written(epoch=2)
    foreign.write("0.1.")
    written, log = Written(), HeldLog(A, appointed=B)
    await store.create(names.wal_name(0), foreign.object(0))
    log.append(written.write("0."), committed_lsn=1)
    archiver = archiver_of(log, store, runtime, PATIENT)
    async with running(archiver):
        await log.archiving.told(problem=True)
    assert isinstance(archiver.alarm, IllegalState)
    assert log.trims == []


async def test_an_object_that_is_gone_is_an_alarm(store: MemoryStore, runtime: Runtime) -> None:
    """The archive does not lose what it had, unless somebody deletes by hand."""
    written, log = Written(), HeldLog(appointed=A)
    log.append(written.write("0.1."), committed_lsn=2)
    async with running(archiver_of(log, store, runtime)):
        await log.reached(archived=1, trimmed_lsn=2)
    await store.delete([names.wal_name(1)])
    log.append(written.write("2."), committed_lsn=3)
    archiver = archiver_of(log, store, runtime)
    async with running(archiver):
        assert names.wal_name(1) in await log.archiving.told(problem=True)
    assert isinstance(archiver.alarm, IllegalState)
    assert await listed(store) == [0]


async def test_an_outage_ends_and_nothing_is_lost(runtime: Runtime) -> None:
    """Refused, unanswered and lost requests are repeated, with the same bytes."""
    store = HeldStore()
    await put_manifest(store.free, manifest_of(0, A, B, C))
    written, log = Written(), HeldLog(appointed=A)
    log.append(written.write("0."), committed_lsn=1)
    settings = EAGER.model_copy(update={"archive_upload_timeout_ms": 3_600_000})
    async with running(archiver_of(log, store, runtime, settings)):
        (await store.arrived(1)).refuse()
        (await store.arrived(2)).lose_request()
        (await store.arrived(3)).lose_reply()
        await log.reached(archived=0, trimmed_lsn=1)
    assert [held.data for held in store.held] == [written.object(0)] * 3


async def test_a_store_that_does_not_answer_is_told_of(runtime: Runtime) -> None:
    """The status has the problem while it lasts, and no longer."""
    store = HeldStore()
    await put_manifest(store.free, manifest_of(0, A, B, C))
    written, log = Written(), HeldLog(appointed=A)
    log.append(written.write("0."), committed_lsn=1)
    settings = EAGER.model_copy(update={"archive_upload_timeout_ms": 10})
    archiver = archiver_of(log, store, runtime, settings)
    async with running(archiver):
        assert names.wal_name(0) in await log.archiving.told(problem=True)
        store.let_go()
        await log.reached(archived=0, trimmed_lsn=1)
        await log.archiving.told(problem=False)
    assert archiver.alarm is None


async def test_archived_never_passes_a_hole(store: MemoryStore, runtime: Runtime) -> None:
    """Uploads overtake each other; what is told of is what has all before it."""
    faulty, hole = FaultyStore(store), names.wal_name(1)
    faulty.fail("create", hole, StoreRefused(store.url, "create", hole, "no permission"), times=99)
    written, log = Written(), HeldLog(appointed=A)
    log.append(written.write("0.1.2.3.4."), committed_lsn=5)
    async with running(archiver_of(log, faulty, runtime)):
        assert "no permission" in await log.archiving.told(problem=True)
        await log.reached(archived=0, trimmed_lsn=1)
        await looked(store, 3)
        assert (log.state.archived_wal_id, len(log.trims)) == (0, 1)
        assert 2 in await listed(store)
        faulty.before = nothing
        await log.reached(archived=4, trimmed_lsn=5)


@pytest.mark.parametrize(
    "changes", [{"cas_mode": CasMode.TWO_PHASE}, {"database_id": b"x" * 16}], ids=str
)
async def test_another_database_is_not_written_to(
    runtime: Runtime, changes: Mapping[str, object]
) -> None:
    """Nor is one whose objects are created in another way."""
    store = MemoryStore(lambda: 0)
    manifest = replace(manifest_of(0, A, B, C), **changes)  # type: ignore[arg-type]
    await store.create(names.manifest_name(0), encode_manifest(manifest))
    written, log = Written(), HeldLog(A, appointed=A)
    log.append(written.write("0."), committed_lsn=1)
    archiver = archiver_of(log, store, runtime)
    async with running(archiver):
        await log.archiving.told(problem=True)
    assert isinstance(archiver.alarm, DatabaseMismatch)
    assert await listed(store) == []


async def test_a_damaged_log_is_not_archived(store: MemoryStore, runtime: Runtime) -> None:
    """Nothing of it counts until it is filled again."""
    written, log = Written(), HeldLog(A, appointed=A)
    log.append(written.write("0."), committed_lsn=1)
    log.state = replace(log.state, health=Health.DAMAGED)
    async with running(archiver_of(log, store, runtime)):
        await looked(store, 3)
        assert await listed(store) == []
        log.state = replace(log.state, health=Health.REFILLING)
        await log.reached(archived=0)


async def test_a_broken_disk_ends_it(runtime: Runtime) -> None:
    """Where nothing may be written any more, the process has to end."""
    store = HeldStore()
    await put_manifest(store.free, manifest_of(0, A, B, C))
    written, log = Written(), HeldLog(A, appointed=A)
    log.append(written.write("0."), committed_lsn=1)
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        task = tasks.create_task(ended(archiver_of(log, store, runtime).run()))
        (await store.arrived(1)).break_disk()
    assert isinstance(task.result(), StoreBroken)


async def test_it_ends_with_its_member(store: MemoryStore, runtime: Runtime) -> None:
    """One that was retired is not waited for."""
    log = HeldLog(A, appointed=A)
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(archiver_of(log, store, runtime).run())
        await looked(store, 2)
        log.retire()
