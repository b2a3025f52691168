"""The loop of the compactor, on a store in memory, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random

import pytest

from shalekv.errors import ObjectNotFound, ShaleError, StoreRefused, Superseded
from shalekv.format import names
from shalekv.protocol.manifest import Manifest, Version
from shalekv.server.compactor import Compactor
from shalekv.settings import CompactorConfig
from shalekv.store.api import ObjectStore
from tests.kit.engine.compaction import (
    CompactedDatabase,
    delete_range,
    put,
    random_entry,
    record,
    small_settings,
)
from tests.kit.engine.hand_clock import hand_runtime
from tests.kit.engine.naive_merge import NaiveLevels, answers
from tests.kit.store import FaultyStore, Gate, Request

KEYS = [b"k%03d" % n for n in range(200)]
EAGER = {"wal_trigger_bytes": 1, "l0_trigger_count": 2, "base_level_bytes": 2_000}


def eager_settings(**more: int) -> CompactorConfig:
    return small_settings(sst_bytes=600, idempotency_record_kept_s=86_400, **EAGER | more)


async def written(seed: int = 3, slots: int = 12) -> CompactedDatabase:
    database, random = await CompactedDatabase.begun(), Random(seed)
    for slot in range(slots):
        commits = [
            [random_entry(random, KEYS, database.logical_time_ms)]
            for _ in range(random.randrange(30))
        ]
        expiry_ms = database.logical_time_ms + 10**6
        records = [record(b"r%d" % slot, expiry_ms)] if commits else []
        await database.write(*commits, records=records)
    return database


async def opened(
    database: CompactedDatabase,
    store: ObjectStore | None = None,
    settings: CompactorConfig | None = None,
    hurry: asyncio.Event | None = None,
    seed: int = 11,
) -> Compactor:
    return await Compactor.open(
        store or database.store,
        settings=settings or eager_settings(),
        runtime=hand_runtime(database.clock, seed),
        hurry=hurry or asyncio.Event(),
    )


async def check(database: CompactedDatabase, *, is_all: bool = True) -> Manifest:
    """The levels hold the writes up to c, or all of them."""
    manifest = await database.stored.refresh()
    naive = await NaiveLevels.read(database.store, manifest)
    now_ms = manifest.logical_time_ms
    assert naive.answers(KEYS, now_ms) == answers(database.compacted(manifest), KEYS, now_ms)
    if is_all:
        assert manifest.first_uncompacted_wal_id == len(database.written)
    return manifest


async def settle(condition: Callable[[], bool]) -> None:
    for _ in range(100_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("what the test waits for does not happen")


async def driven(database: CompactedDatabase, compactor: Compactor, *, step_ms: float = 50) -> None:
    """Run the compactor once while time advances; raises its error."""
    failure: ShaleError | None = None

    async def run() -> None:
        nonlocal failure
        try:
            await compactor.run(is_once=True)
        except ShaleError as error:  # raised below, because the group would wrap it
            failure = error

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(run())
        while not task.done():
            database.clock.advance(step_ms)
            await asyncio.sleep(0)
    if failure is not None:
        raise failure


async def until_compacted(database: CompactedDatabase, *, step_ms: float = 0) -> None:
    """Let tasks run, and time advance, until all slots are compacted."""
    for _ in range(10_000):
        database.clock.advance(step_ms)
        await asyncio.sleep(0)
        manifest = await database.stored.refresh()
        if manifest.first_uncompacted_wal_id == len(database.written):
            return
    raise AssertionError("the slots are not compacted")


@asynccontextmanager
async def running(compactor: Compactor) -> AsyncIterator[asyncio.Task[None]]:
    """The loop of the compactor, until the end of the test."""
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(compactor.run())
        try:
            yield task
        finally:
            task.cancel()


async def test_a_lease_is_renewed_while_a_job_runs() -> None:
    """The lease of a job is renewed until it publishes, however long it takes."""
    database = await written()
    ttl_s = 10
    gate = Gate("create", names.LEVELS_FOLDER, is_open=False)
    settings = eager_settings(compactor_lease_ttl_s=ttl_s)
    compactor = await opened(database, FaultyStore(database.store, before=gate), settings)
    first = (await database.stored.refresh()).leases
    async with running(compactor):
        for _ in range(40):
            database.clock.advance(ttl_s * 1_000 / 20)
            for _ in range(50):
                await asyncio.sleep(0)
            manifest = await database.stored.refresh()
            now_s = database.store_now_ms() / 1_000
            assert all(lease.expire_time_s >= now_s for lease in manifest.leases)
            assert [lease.id for lease in manifest.leases] == [lease.id for lease in first]
        gate.open()
        await settle(lambda: compactor.counters.jobs > 0)
    assert (await check(database, is_all=False)).leveled_ssts


async def test_polls_become_rare_when_idle() -> None:
    """Without work the store is asked at polls only, and polls become rare."""
    database = await CompactedDatabase.begun()
    settings = small_settings(compactor_idle_poll_ms=10_000)
    store = FaultyStore(database.store)
    compactor = await opened(database, store, settings)
    async with running(compactor):
        for _ in range(310):
            database.clock.advance(100)
            for _ in range(50):
                await asyncio.sleep(0)
    polls = store.asked("list", names.WAL_FOLDER)
    assert len(polls) == len((0, 1, 3, 7, 15, 25))  # seconds


async def test_a_hurry_compacts_at_once() -> None:
    """WAL objects that no trigger makes due are compacted as soon as a writer waits for it."""
    database = await written()
    hurry = asyncio.Event()
    compactor = await opened(database, settings=small_settings(), hurry=hurry)
    async with running(compactor):
        for _ in range(200):
            await asyncio.sleep(0)
        assert (await database.stored.refresh()).wal_id_last_compacted is None
        hurry.set()
        await until_compacted(database)
    await check(database)
    assert not hurry.is_set()


async def test_the_wal_does_not_wait_for_a_merge() -> None:
    """Slots are compacted into L0 while a merge of levels runs."""
    database = await written()
    gate = Gate("get_range", is_open=False)  # only merges of levels read pieces
    settings = eager_settings(compactor_idle_poll_ms=10, l0_trigger_count=8)
    compactor = await opened(database, FaultyStore(database.store, before=gate), settings)
    async with running(compactor):
        while not gate.waiting:
            await database.write([put(b"k001")])
            database.clock.advance(10)
            for _ in range(100):
                await asyncio.sleep(0)
        jobs = compactor.counters.jobs
        for _ in range(3):
            await database.write([put(b"k002", b"new")], [delete_range(b"k1", b"k2")])
            database.clock.advance(10)
            for _ in range(100):
                await asyncio.sleep(0)
        assert compactor.counters.jobs >= jobs + 3
        manifest = await check(database)
        assert not Version.of(manifest).runs
        gate.open()
        await settle(lambda: compactor.counters.jobs >= jobs + 4)
    assert Version.of(await database.stored.refresh()).runs
    await check(database)


@pytest.mark.parametrize("operation", ["list", "get", "get_range", "create", "now_ms"])
async def test_a_store_that_fails_for_a_while_is_asked_again(operation: str) -> None:
    """Unanswered requests delay compaction, and lose nothing."""
    database = await written()
    flaky = FaultyStore(database.store)
    compactor = await opened(database, flaky)
    flaky.fail(operation, times=30)
    await driven(database, compactor, step_ms=1_000)
    assert len(flaky.asked(operation)) > 30
    await check(database)


async def test_what_fails_again_and_again_is_tried_ever_less_often() -> None:
    """Pauses between failing attempts grow, since each may cost a merge; a hurry ends a pause."""
    database = await written()
    store, hurry = FaultyStore(database.store), asyncio.Event()
    refused = StoreRefused("memory://compacted", "create", names.LEVELS_FOLDER, "no room")
    store.fail("create", names.LEVELS_FOLDER, refused, times=10**6)
    compactor = await opened(database, store, hurry=hurry)

    async def attempts_in(seconds: int) -> int:
        before = len(store.asked("create", names.LEVELS_FOLDER))
        for _ in range(10 * seconds):
            database.clock.advance(100)
            for _ in range(50):
                await asyncio.sleep(0)
        return len(store.asked("create", names.LEVELS_FOLDER)) - before

    async with running(compactor):
        await attempts_in(60)
        assert 8 <= await attempts_in(150) <= 22  # one each 7.5 to 15 s
        hurry.set()
        assert await attempts_in(3) >= 1


async def test_an_object_that_stays_away_ends_the_compactor() -> None:
    """A slot that is listed and cannot be read for long ends the compactor."""
    database = await written()
    gone = names.wal_name(0)
    store = FaultyStore(database.store)
    store.fail("get", gone, ObjectNotFound("memory://compacted", "get", gone, "gone"), times=10**6)
    compactor = await opened(database, store)
    with pytest.raises(ObjectNotFound):
        await driven(database, compactor, step_ms=1_000)


async def test_a_stalled_claim_does_not_displace_a_later_compactor() -> None:
    """A claim that stalled before it was confirmed does not displace a later compactor (F2)."""
    database = await written(slots=1)
    later: list[asyncio.Task[Compactor]] = []

    async def after(request: Request) -> None:
        is_claim = request.operation == "create" and request.name.startswith(names.MANIFEST_FOLDER)
        if is_claim and not later:
            later.append(asyncio.create_task(opened(database, seed=12)))
            await later[0]

    claiming = asyncio.create_task(opened(database, FaultyStore(database.store, after=after)))
    while not claiming.done():
        database.clock.advance(1_000)
        await asyncio.sleep(0)
    with pytest.raises(Superseded):
        await claiming
    await driven(database, later[0].result(), step_ms=1_000)
    await check(database)
