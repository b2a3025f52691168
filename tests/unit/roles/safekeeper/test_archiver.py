"""The archiver of one member: what it adds, what it trims, and when it stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

from shalekv.core.manifest import WalMode
from shalekv.format import names
from shalekv.runtime import Runtime
from shalekv.store.api import ObjectInfo
from shalekv.store.memory import MemoryObjects, MemoryStore
from tests.kit.processes.in_process import memory_store
from tests.kit.quorum.held_log import (
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
from tests.kit.store import HeldStore


async def test_the_appointed_member_archives_what_is_complete(
    store: MemoryStore, runtime: Runtime
) -> None:
    """Objects have the bytes that the log gives them, the epoch as metadata, and are trimmed; what
    is still open stays.
    """
    written, log = Written(), HeldLog(appointed=A)
    log.append(written.write("000.11-.2.33"), committed_lsn=9)
    async with running(archiver_of(log, store, runtime)):
        await log.reached(archived=2, trimmed_lsn=7)
        assert log.archiving.is_archiver
    assert await listed(store) == [0, 1, 2]
    for wal_id in range(3):
        stored = await store.get(names.wal_name(wal_id))
        assert stored.data == written.object(wal_id)
        assert stored.metadata == {"writer_epoch": "3"}
    assert log.state.log.base == written.records[6].mark


async def test_the_appointment_alone_is_enough(store: MemoryStore, runtime: Runtime) -> None:
    """A member that waits for more archives at once when it is appointed, by an idle writer."""
    never = PATIENT.model_copy(update={"archive_look_interval_ms": 3_600_000})
    written, log = Written(), HeldLog()
    log.append(written.write("0.1."), committed_lsn=2)
    async with running(archiver_of(log, store, runtime, never)):
        await looked(store, 1)
        assert await listed(store) == []
        log.appoint(A)
        await log.reached(archived=1)
    assert await listed(store) == [0, 1]


async def test_what_is_not_committed_is_not_archived(store: MemoryStore, runtime: Runtime) -> None:
    """A record in flight may lose: not even the object whose end it is gets archived (CE7)."""
    written, log = Written(), HeldLog(appointed=A)
    log.append(written.write("0.11.22."), committed_lsn=2)
    async with running(archiver_of(log, store, runtime)):
        await log.reached(archived=0, trimmed_lsn=1)
        assert await listed(store) == [0]
        log.append([], committed_lsn=3)
        await log.reached(archived=1, trimmed_lsn=3)
    assert await listed(store) == [0, 1]


class GatedLists(MemoryStore):
    """The lists of the log wait at a gate, but for the first one."""

    def __init__(self, objects: MemoryObjects) -> None:
        super().__init__(lambda: 0, objects=objects)
        self.gate = asyncio.Event()
        self.asked = asyncio.Event()
        self.passes = 1

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        if prefix == names.WAL_FOLDER:
            self.passes -= 1
            if self.passes < 0:
                self.asked.set()
                await self.gate.wait()
        async for info in super().list(prefix, start_after=start_after):
            yield info


async def test_nobody_trims_what_it_has_not_listed(runtime: Runtime) -> None:
    """That an upload has ended well is not enough to drop what was uploaded (CE13)."""
    store = GatedLists(MemoryObjects())
    await put_manifest(store, manifest_of(0, A, B, C))
    written, log = Written(), HeldLog(appointed=A)
    log.append(written.write("0.1.2."), committed_lsn=3)
    async with running(archiver_of(log, store, runtime)):
        await log.reached(archived=2)
        assert log.trims == []
        await store.asked.wait()
        assert log.trims == []
        store.gate.set()
        await log.reached(trimmed_lsn=3)


async def test_a_member_trims_what_another_has_archived(
    objects: MemoryObjects, store: MemoryStore, runtime: Runtime
) -> None:
    """It uploads nothing, and lists the archive itself."""
    written = Written()
    records = written.write("00.1.22-.3")
    a, b = HeldLog(A, appointed=A), HeldLog(B, appointed=A)
    held = HeldStore(objects)
    for log in (a, b):
        log.append(records, committed_lsn=len(records))
    async with running(archiver_of(a, store, runtime), archiver_of(b, held, runtime, PATIENT)):
        await b.reached(archived=2, trimmed_lsn=6)
    assert held.held == []


async def test_a_member_without_room_looks_at_once(
    objects: MemoryObjects, store: MemoryStore, runtime: Runtime
) -> None:
    """Others have archived what fills its log: it does not wait for the time of its next look."""
    rarely = PATIENT.model_copy(update={"archive_look_interval_ms": 3_600_000})
    written = Written()
    records = written.write("00.1.22-.3")
    a, b = HeldLog(A, appointed=A), HeldLog(B, appointed=A)
    for log in (a, b):
        log.append(records, committed_lsn=len(records))
    own = memory_store(objects)
    async with running(archiver_of(b, own, runtime, rarely)):
        await looked(own, 1)
        async with running(archiver_of(a, store, runtime)):
            await a.reached(archived=2)
        assert b.trims == []
        b.want_room()
        await b.reached(archived=2, trimmed_lsn=6)
        assert not b.is_room_wanted


async def test_another_takes_over_from_one_that_is_gone(
    store: MemoryStore, runtime: Runtime
) -> None:
    """What the appointed member does not archive is archived by another that has waited."""
    written, log = Written(), HeldLog(A, appointed=B)
    log.append(written.write("0.1.2."), committed_lsn=3)
    async with running(archiver_of(log, store, runtime)):
        await log.reached(archived=2, trimmed_lsn=3)


async def test_nobody_takes_over_before_its_time(store: MemoryStore, runtime: Runtime) -> None:
    """One that was not asked looks, and does nothing else."""
    written, log = Written(), HeldLog(A, appointed=B)
    log.append(written.write("0.1.2."), committed_lsn=3)
    async with running(archiver_of(log, store, runtime, PATIENT)):
        await looked(store, 3)
        assert not log.archiving.is_archiver
        log.archiver_id = A
        await log.reached(archived=2)


async def test_archivers_that_race_agree(
    objects: MemoryObjects, store: MemoryStore, runtime: Runtime
) -> None:
    """Members that all archive at once make the same objects, and find no fault in it (CE16)."""
    written = Written()
    records = written.write("".join(f"{n}{n}-{n}." for n in range(10)))
    logs = [HeldLog(each, appointed=each) for each in (A, B, C)]
    # Each reads pieces of another size.
    sizes = (4_096, 5_000, 1 << 20)
    archivers = []
    for log, read_bytes in zip(logs, sizes, strict=True):
        log.append(records, committed_lsn=len(records))
        settings = EAGER.model_copy(update={"archive_read_bytes": read_bytes})
        archivers.append(archiver_of(log, memory_store(objects), runtime, settings))
    async with running(*archivers):
        for log in logs:
            await log.reached(archived=9, trimmed_lsn=len(records))
    for wal_id in range(10):
        assert (await store.get(names.wal_name(wal_id))).data == written.object(wal_id)
    assert [log.archiving.problem for log in logs] == [""] * 3


async def test_an_object_that_was_created_before_is_no_rival(runtime: Runtime) -> None:
    """Two creates of one object at once, of which each is told that it exists: both succeed."""
    objects = MemoryObjects()
    one, other = HeldStore(objects), HeldStore(objects)
    await put_manifest(one.free, manifest_of(0, A, B, C))
    written = Written()
    records = written.write("00.")
    logs = [HeldLog(A, appointed=A), HeldLog(B, appointed=B)]
    for log in logs:
        log.append(records, committed_lsn=2)
    async with running(archiver_of(logs[0], one, runtime), archiver_of(logs[1], other, runtime)):
        first, second = await one.arrived(1), await other.arrived(1)
        assert first.data == second.data
        first.release()
        second.release()
        for log in logs:
            await log.reached(archived=0, trimmed_lsn=2)


async def test_collected_objects_count_as_archived(store: MemoryStore, runtime: Runtime) -> None:
    """What is compacted is neither uploaded again nor missed, and is trimmed."""
    await put_manifest(store, manifest_of(1, A, B, C, c=2))
    written, log = Written(), HeldLog(appointed=A)
    log.append(written.write("0.1.2.3.4."), committed_lsn=5)
    async with running(archiver_of(log, store, runtime)):
        await log.reached(archived=4, trimmed_lsn=5)
    assert await listed(store) == [3, 4]


class CollectedAtList(MemoryStore):
    """When object 2 is there, all up to it are compacted and collected as the log is listed."""

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        if prefix == names.WAL_FOLDER and 2 in await listed(self):
            await put_manifest(self, manifest_of(1, A, B, C, c=2))
            await self.delete([names.wal_name(wal_id) for wal_id in range(3)])
        async for info in super().list(prefix, start_after=start_after):
            yield info


async def test_a_collection_during_a_look_is_no_hole(runtime: Runtime) -> None:
    """The manifest is read after the list, so that what was deleted before it is known."""
    store = CollectedAtList(lambda: 0)
    await put_manifest(store, manifest_of(0, A, B, C))
    written, log = Written(), HeldLog(A, appointed=A)
    log.append(written.write("0.1.2.3."), committed_lsn=4)
    archiver = archiver_of(log, store, runtime)
    async with running(archiver):
        await log.reached(archived=3, trimmed_lsn=4)
    assert archiver.alarm is None
    assert await listed(store) == [3]


async def test_a_log_that_was_begun_anew_is_followed(store: MemoryStore, runtime: Runtime) -> None:
    """A member that was behind the archive goes on where its new log begins."""
    written, log = Written(), HeldLog(A, appointed=A)
    records = written.write("0.1.2.3.4.")
    for wal_id in range(3):
        await store.create(names.wal_name(wal_id), written.object(wal_id))
    log.append(records[:1], committed_lsn=1)
    async with running(archiver_of(log, store, runtime)):
        await log.reached(trimmed_lsn=1)
        log.reset(records[2].mark)
        log.append(records[3:], committed_lsn=5)
        await log.reached(archived=4, trimmed_lsn=5)
    assert await listed(store) == [*range(5)]


async def test_who_is_not_named_archives_nothing(store: MemoryStore, runtime: Runtime) -> None:
    """Neither before the manifest names it nor after, and not when the log is in the store."""
    await put_manifest(store, manifest_of(1, B, C))
    written, log = Written(), HeldLog(A, appointed=A)
    log.append(written.write("0."), committed_lsn=1)
    async with running(archiver_of(log, store, runtime)):
        await looked(store, 3)
        assert await listed(store) == []
        in_store = replace(manifest_of(2), wal_mode=WalMode.OBJECT_STORE)
        await put_manifest(store, in_store)
        await looked(store, 3)
        assert await listed(store) == []
        await put_manifest(store, manifest_of(3, A, B, C))
        await log.reached(archived=0, trimmed_lsn=1)
        await put_manifest(store, manifest_of(4, B, C))
        await looked(store, 3)
        log.append(written.write("1."), committed_lsn=2)
        await looked(store, 3)
    assert await listed(store) == [0]


async def test_a_member_may_be_older_than_its_database(runtime: Runtime) -> None:
    """Until the first manifest is there, nothing is wrong."""
    store = memory_store(MemoryObjects())
    written, log = Written(), HeldLog(A, appointed=A)
    log.append(written.write("0."), committed_lsn=1)
    async with running(archiver_of(log, store, runtime)):
        await looked(store, 3)
        assert log.archiving.problem == ""
        await put_manifest(store, manifest_of(0, A, B, C))
        await log.reached(archived=0)
