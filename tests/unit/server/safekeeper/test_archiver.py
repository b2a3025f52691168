"""The archiver of one member: what it uploads and trims, and when it stops."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator, Mapping
from dataclasses import replace
from operator import attrgetter

import pytest

from shalekv.errors import DatabaseMismatch, IllegalState, StoreBroken, StoreRefused
from shalekv.format import names
from shalekv.format.manifest import encode_manifest
from shalekv.protocol.manifest import CasMode, WalMode
from shalekv.protocol.quorum.acceptor import AcceptorState
from shalekv.protocol.quorum_records import LogHealth
from shalekv.runtime import Runtime
from shalekv.store.api import RequestKind
from shalekv.store.memory import MemoryObjects, MemoryStore
from tests.kit.constants import constants, set_constants
from tests.kit.processes.in_process import memory_store, real_runtime
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
from tests.kit.store import FaultyStore, HeldStore, Request, nothing


@pytest.fixture(autouse=True)
def _manifest_is_read_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    set_constants(monkeypatch, {"shalekv.server.safekeeper.archiver:MANIFEST_INTERVAL_MS": 10})


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    """A runtime with real time, and threads."""
    with real_runtime() as runtime:
        yield runtime


@pytest.fixture
def objects() -> MemoryObjects:
    """The names of the WAL objects of the database."""
    return MemoryObjects()


@pytest.fixture
async def store(objects: MemoryObjects) -> MemoryStore:
    """A store with a manifest that names all three members."""
    store = memory_store(objects)
    await put_manifest(store, manifest_of(0, A, B, C))
    return store


async def test_the_appointed_member_archives_what_is_complete(
    store: MemoryStore, runtime: Runtime
) -> None:
    """Objects have the bytes that the log gives them and the epoch as metadata, and are trimmed;
    the open object stays.
    """
    written, log = Written(), HeldLog(appointed=A)
    log.append(written.write("000.11-.2.33"), committed_lsn=9)
    async with running(archiver_of(log, store, runtime)):
        await log.reached(archived=2, trimmed_lsn=7)
        assert log.archiver_status.is_archiver
    assert await listed(store) == [0, 1, 2]
    for wal_id in range(3):
        stored = await store.get(names.wal_name(wal_id))
        assert stored.data == written.object(wal_id)
        assert stored.metadata == {"writer_epoch": "3"}
    assert log.state.log.base == written.records[6].mark


async def test_what_is_not_committed_is_not_archived(store: MemoryStore, runtime: Runtime) -> None:
    """An object whose last record is not committed is not archived: the record may lose (CE7)."""
    written, log = Written(), HeldLog(appointed=A)
    log.append(written.write("0.11.22."), committed_lsn=2)
    async with running(archiver_of(log, store, runtime)):
        await log.reached(archived=0, trimmed_lsn=1)
        assert await listed(store) == [0]
        log.append([], committed_lsn=3)
        await log.reached(archived=1, trimmed_lsn=3)
    assert await listed(store) == [0, 1]


async def test_only_listed_objects_are_trimmed(store: MemoryStore, runtime: Runtime) -> None:
    """A successful upload is not enough to trim an object (CE13)."""
    gate, asked = asyncio.Event(), asyncio.Event()

    async def hold_lists(_: Request) -> None:
        if len(gated.asked("list", names.WAL_FOLDER)) > 1:
            asked.set()
            await gate.wait()

    gated = FaultyStore(store, before=hold_lists)
    written, log = Written(), HeldLog(appointed=A)
    log.append(written.write("0.1.2."), committed_lsn=3)
    async with running(archiver_of(log, gated, runtime)):
        await log.reached(archived=2)
        assert log.trims == []
        await asked.wait()
        assert log.trims == []
        gate.set()
        await log.reached(trimmed_lsn=3)


async def test_a_member_without_space_polls_at_once(
    objects: MemoryObjects, store: MemoryStore, runtime: Runtime
) -> None:
    """A member whose log is full polls at once: other members may have archived it."""
    rarely = PATIENT.model_copy(update={"archive_list_interval_ms": 3_600_000})
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
        b.want_space()
        await b.reached(archived=2, trimmed_lsn=6)
        assert not b.is_space_wanted


async def test_collected_objects_count_as_archived(store: MemoryStore, runtime: Runtime) -> None:
    """Compacted objects are neither uploaded again nor reported as missing, and are trimmed."""
    await put_manifest(store, manifest_of(1, A, B, C, c=2))
    written, log = Written(), HeldLog(appointed=A)
    log.append(written.write("0.1.2.3.4."), committed_lsn=5)
    async with running(archiver_of(log, store, runtime)):
        await log.reached(archived=4, trimmed_lsn=5)
    assert await listed(store) == [3, 4]


async def test_a_collection_during_a_poll_is_no_gap(store: MemoryStore, runtime: Runtime) -> None:
    """The manifest is read after the list, so a collection in between is no gap."""

    async def collect(request: Request) -> None:
        is_list = (request.operation, request.name) == ("list", names.WAL_FOLDER)
        if is_list and 2 in await listed(store):
            await put_manifest(store, manifest_of(1, A, B, C, c=2))
            await store.delete([names.wal_name(wal_id) for wal_id in range(3)])

    written, log = Written(), HeldLog(A, appointed=A)
    log.append(written.write("0.1.2.3."), committed_lsn=4)
    archiver = archiver_of(log, FaultyStore(store, before=collect), runtime)
    async with running(archiver):
        await log.reached(archived=3, trimmed_lsn=4)
    assert archiver.alarm is None
    assert await listed(store) == [3]


async def test_a_log_that_was_reset_is_followed(store: MemoryStore, runtime: Runtime) -> None:
    """The archiver of a member whose log was reset continues where the new log begins."""
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


async def test_unnamed_member_archives_nothing(store: MemoryStore, runtime: Runtime) -> None:
    """A member archives nothing unless the manifest of a quorum WAL names it."""
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


async def ended(run: Awaitable[None]) -> BaseException | None:
    try:
        await run
    except StoreBroken as error:
        return error
    return None


async def test_other_bytes_stop_the_archiver(store: MemoryStore, runtime: Runtime) -> None:
    """An object with other bytes is not touched, nothing more is archived or trimmed, and the
    status has the problem.
    """
    foreign = Written(epoch=2)
    foreign.write("0.1.")
    await store.create(names.wal_name(1), foreign.object(1))
    written, log = Written(), HeldLog(appointed=A)
    log.append(written.write("0."), committed_lsn=1)
    # It looks once, and meets the other object when it uploads its own.
    settings = EAGER.model_copy(update={"archive_list_interval_ms": 3_600_000})
    archiver = archiver_of(log, store, runtime, settings)
    async with running(archiver):
        await log.reached(archived=0)
        log.append(written.write("1."), committed_lsn=2)
        assert names.wal_name(1) in await log.archiver_status.reported(problem=True)
        log.append(written.write("2.3."), committed_lsn=4)
    assert isinstance(archiver.alarm, IllegalState)
    assert log.archiver_status.problem == str(archiver.alarm)
    assert not log.archiver_status.is_archiver
    assert await listed(store) == [0, 1]
    assert (await store.get(names.wal_name(1))).data == foreign.object(1)
    assert log.trims == []


async def test_what_others_have_archived_is_compared(store: MemoryStore, runtime: Runtime) -> None:
    """A member that only trims compares objects as well: one with other bytes raises an alarm."""
    foreign = Written(epoch=2)
    foreign.write("0.1.")
    written, log = Written(), HeldLog(A, appointed=B)
    await store.create(names.wal_name(0), foreign.object(0))
    log.append(written.write("0."), committed_lsn=1)
    archiver = archiver_of(log, store, runtime, PATIENT)
    async with running(archiver):
        await log.archiver_status.reported(problem=True)
    assert isinstance(archiver.alarm, IllegalState)
    assert log.trims == []


async def test_an_object_that_is_gone_is_an_alarm(store: MemoryStore, runtime: Runtime) -> None:
    """An archived object that has disappeared raises an alarm."""
    written, log = Written(), HeldLog(appointed=A)
    log.append(written.write("0.1."), committed_lsn=2)
    async with running(archiver_of(log, store, runtime)):
        await log.reached(archived=1, trimmed_lsn=2)
    await store.delete([names.wal_name(1)])
    log.append(written.write("2."), committed_lsn=3)
    archiver = archiver_of(log, store, runtime)
    async with running(archiver):
        assert names.wal_name(1) in await log.archiver_status.reported(problem=True)
    assert isinstance(archiver.alarm, IllegalState)
    assert await listed(store) == [0]


async def test_an_outage_ends_and_nothing_is_lost(runtime: Runtime) -> None:
    """Refused, unanswered and lost requests are repeated, with the same bytes."""
    store = HeldStore()
    await put_manifest(store.free, manifest_of(0, A, B, C))
    written, log = Written(), HeldLog(appointed=A)
    log.append(written.write("0."), committed_lsn=1)
    async with running(archiver_of(log, store, runtime)):
        (await store.arrived(1)).refuse()
        (await store.arrived(2)).lose_request()
        (await store.arrived(3)).lose_reply()
        await log.reached(archived=0, trimmed_lsn=1)
    assert [held.data for held in store.held] == [written.object(0)] * 3


async def test_a_store_that_does_not_answer_is_reported(runtime: Runtime) -> None:
    """The status has the problem while it lasts, and no longer."""
    store = HeldStore()
    await put_manifest(store.free, manifest_of(0, A, B, C))
    written, log = Written(), HeldLog(appointed=A)
    log.append(written.write("0."), committed_lsn=1)
    with constants({"shalekv.server.safekeeper.archiver:UPLOAD_TIMEOUT_MS": 10}):
        archiver = archiver_of(log, store, runtime)
    async with running(archiver):
        assert names.wal_name(0) in await log.archiver_status.reported(problem=True)
        store.release_all()
        await log.reached(archived=0, trimmed_lsn=1)
        await log.archiver_status.reported(problem=False)
    assert archiver.alarm is None


async def test_few_objects_are_archived_behind_a_gap(runtime: Runtime) -> None:
    """While an upload has no answer, no object is begun that is a whole window behind it.

    So an object that contradicts the log has less than a window behind it, which is what other
    members and an opening compare.
    """
    store = HeldStore()
    await put_manifest(store.free, manifest_of(0, A, B, C))
    written, log = Written(), HeldLog(appointed=A)
    log.append(written.write("0.1.2.3.4.5.6.7."), committed_lsn=8)
    async with running(archiver_of(log, store, runtime)):
        await store.arrived(4)  # in any order: objects are made side by side
        first, *others = sorted(store.held, key=attrgetter("name"))
        for held in others:
            held.release()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await store.arrived(5)
        first.release()
        await store.arrived(8)
        assert {held.name for held in store.held} == {names.wal_name(number) for number in range(8)}
        store.release_all()
        await log.reached(archived=7, trimmed_lsn=8)


async def test_archived_never_passes_a_hole(store: MemoryStore, runtime: Runtime) -> None:
    """Uploads overtake each other, but an object counts as archived only if all before it are."""
    faulty, hole = FaultyStore(store), names.wal_name(1)
    faulty.fail("create", hole, StoreRefused(store.url, "create", hole, "no permission"), times=99)
    written, log = Written(), HeldLog(appointed=A)
    log.append(written.write("0.1.2.3.4."), committed_lsn=5)
    async with running(archiver_of(log, faulty, runtime)):
        assert "no permission" in await log.archiver_status.reported(problem=True)
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
    """Nothing is written to another database, or to one with another CAS mode. A member that no
    writer has used raises no alarm by that: its database may not have been created.
    """
    store = MemoryStore(lambda: 0)
    manifest = replace(manifest_of(0, A, B, C), **changes)  # type: ignore[arg-type]
    await store.create(names.manifest_name(0), encode_manifest(manifest))
    written, log = Written(), HeldLog(A)
    log.state = AcceptorState(A)
    archiver = archiver_of(log, store, runtime)
    async with running(archiver):
        for _ in range(100):
            await asyncio.sleep(0)
        assert not store.sent.by_kind[RequestKind.LIST]
        log.append(written.write("0."), committed_lsn=1)
        await log.archiver_status.reported(problem=True)
    assert isinstance(archiver.alarm, DatabaseMismatch)
    assert await listed(store) == []


async def test_a_damaged_log_is_not_archived(store: MemoryStore, runtime: Runtime) -> None:
    """A damaged log is not archived until it is filled again."""
    written, log = Written(), HeldLog(A, appointed=A)
    log.append(written.write("0."), committed_lsn=1)
    log.state = replace(log.state, health=LogHealth.DAMAGED)
    async with running(archiver_of(log, store, runtime)):
        await looked(store, 3)
        assert await listed(store) == []
        log.state = replace(log.state, health=LogHealth.REFILLING)
        await log.reached(archived=0)


async def test_a_broken_disk_ends_it(runtime: Runtime) -> None:
    """The archiver ends with `StoreBroken` where nothing may be written any more."""
    store = HeldStore()
    await put_manifest(store.free, manifest_of(0, A, B, C))
    written, log = Written(), HeldLog(A, appointed=A)
    log.append(written.write("0."), committed_lsn=1)
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        task = tasks.create_task(ended(archiver_of(log, store, runtime).run()))
        (await store.arrived(1)).break_disk()
    assert isinstance(task.result(), StoreBroken)


async def test_it_ends_with_its_member(store: MemoryStore, runtime: Runtime) -> None:
    """The archiver ends when its member is retired."""
    log = HeldLog(A, appointed=A)
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(archiver_of(log, store, runtime).run())
        await looked(store, 2)
        log.retire()
