"""The compactors of one process, over databases that fail, are taken over, or are busy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from random import Random

import pytest
from structlog.testing import capture_logs

from shalekv.clock import LoopClock
from shalekv.errors import (
    DatabaseNotFound,
    ShaleError,
    StoreBroken,
    StoreUnavailable,
    Superseded,
)
from shalekv.format import names
from shalekv.jobs.compact.parts import MergePart, OwnProcessParts, PartResult
from shalekv.protocol.compaction.publish import CompactorId
from shalekv.runtime import Runtime
from shalekv.server.compactor import (
    CLOSE_S,
    MERGES_MAX,
    RETRY_MS_MAX,
    CompactionTarget,
    Compactor,
    Compactors,
)
from shalekv.settings import CompactorConfig
from shalekv.store.cas import CasStore
from shalekv.store.memory import MemoryStore
from tests.kit.engine.compaction import CompactedDatabase, put, small_settings
from tests.kit.inline_runtime import InlineWorkers
from tests.kit.store import FOR_EVER, FaultyStore, Gate, Request, nothing
from tests.kit.virtual_time import virtual_time

EAGER = small_settings(wal_trigger_bytes=1, l0_trigger_count=2, base_level_bytes=2_000)
ONLY_WAL = small_settings(wal_trigger_bytes=1, l0_trigger_count=1_000)
STEP_S = 0.05
A_WHILE_S = 300.0
FOLDERS = WAL, LEVELS, MANIFESTS = names.WAL_FOLDER, names.LEVELS_FOLDER, names.MANIFEST_FOLDER


async def written(name: str, slots: int = 4) -> tuple[CompactedDatabase, FaultyStore]:
    """A database with some of the WAL to compact, and its store under this name."""
    database = await CompactedDatabase.begun()
    for slot in range(slots):
        await database.write([put(b"k%03d" % slot, bytes(100))])
    return database, named(name, database.store)


async def leveled(name: str) -> tuple[CompactedDatabase, FaultyStore]:
    """A database with two SSTs in L0 that overlap, and some of the WAL."""
    database, store = await written(name, slots=0)
    for _ in range(2):
        await database.write([put(b"k", bytes(100))])
        await database.compact_wal()
    await database.write([put(b"k")])
    return database, store


def named(name: str, inner: MemoryStore | None = None) -> FaultyStore:
    store = FaultyStore(inner or MemoryStore(lambda: 0))
    store.url = f"memory://{name}"
    return store


def runtime(seed: int = 1) -> Runtime:
    return Runtime(LoopClock(), Random(seed), InlineWorkers())


def compactors(
    stores: Sequence[FaultyStore],
    settings: CompactorConfig = EAGER,
    parts: Callable[[CasStore], OwnProcessParts] = OwnProcessParts,
) -> Compactors:
    chosen = runtime()
    places = [
        CompactionTarget(store, chosen, parts(CasStore(store, chosen, settings.store)))
        for store in stores
    ]
    return Compactors(places, settings)


@asynccontextmanager
async def running(role: Compactors) -> AsyncIterator[asyncio.Task[None]]:
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(role.run())
        yield task
        task.cancel()


async def ended(role: Compactors) -> ShaleError:
    """Run the compactors to their end, and return the error."""
    with pytest.raises(ShaleError) as raised:
        async with asyncio.timeout(A_WHILE_S):
            await role.run()
    return raised.value


async def passed(seconds: float) -> None:
    await LoopClock().sleep_ms(seconds * 1_000)


async def until(condition: Callable[[], bool], within_s: float = A_WHILE_S) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await passed(STEP_S)


async def until_compacted(*databases: CompactedDatabase, within_s: float = A_WHILE_S) -> None:
    async with asyncio.timeout(within_s):
        for database in databases:
            while await uncompacted(database):
                await passed(STEP_S)


async def uncompacted(database: CompactedDatabase) -> int:
    manifest = await database.stored.refresh()
    return len(database.written) - manifest.first_uncompacted_wal_id


async def take_over(store: FaultyStore, seed: int = 99) -> Compactor:
    """Have another process become the compactor."""
    return await Compactor.open(
        store.inner, settings=EAGER, runtime=runtime(seed), hurry=asyncio.Event()
    )


async def stored_names(database: CompactedDatabase) -> list[str]:
    return [each.name for folder in FOLDERS async for each in database.store.list(folder)]


async def damage(database: CompactedDatabase, slot: int) -> None:
    await database.store.delete([names.wal_name(slot)])
    await database.store.create(names.wal_name(slot), b"no object of ours")


@virtual_time(orders=3)
async def test_databases_that_fail_do_not_hold_up_the_others() -> None:
    """A damaged, a missing and an unreachable database are logged by URL and tried again; the
    others are compacted, later writes included.
    """
    (one, first), (two, second) = await written("one"), await written("two")
    damaged, broken = await written("damaged")
    await damage(damaged, 1)
    silent = named("silent")
    silent.fail("list", times=FOR_EVER)
    role = compactors([broken, first, named("missing"), silent, second])
    with capture_logs() as lines:
        async with running(role):
            await until_compacted(one, two, within_s=10)
            await passed(A_WHILE_S)
            for database in (one, two):
                await database.write([put(b"later")])
            await until_compacted(one, two, within_s=30)
    lines_of_ends = [line for line in lines if line["event"] == "compactor ended by an error"]
    reasons = {(line["url"], line["reason"]) for line in lines_of_ends}
    assert {url for url, _ in reasons} == {
        "memory://damaged",
        "memory://missing",
        "memory://silent",
    }
    assert ("memory://missing", "DATABASE_NOT_FOUND") in reasons
    assert ("memory://silent", "STORE_UNAVAILABLE") in reasons
    of_missing = [line for line in lines_of_ends if line["url"] == "memory://missing"]
    assert 8 <= len(of_missing) <= 16  # waits of 1, 2, 4 .. 60 s, each of them half as long or more
    done = {labels: sample for family, labels, sample in role.done if "compaction" in family.name}
    merges, failures = done["wal",], done[()]
    assert isinstance(merges, int)
    assert isinstance(failures, int)
    assert merges >= 4  # of each, and later writes
    assert failures >= 1  # of the damaged one
    assert {("wal", "read"), ("wal", "written")} < done.keys()


@virtual_time()
async def test_an_error_that_nobody_expects_does_not_end_the_others() -> None:
    """An unexpected error is logged with its traceback, and the database is tried again."""
    (one, first), (two, second) = await written("one"), await written("two")
    first.fail("list", WAL, KeyError("a bug"), times=1)
    with capture_logs() as lines:
        async with running(compactors([first, second])):
            await until_compacted(one, two)
    (line,) = [line for line in lines if "unexpected" in line["event"]]
    assert line["url"] == "memory://one"
    assert line["exc_info"] is not None


@virtual_time()
async def test_a_database_that_is_created_later_is_compacted() -> None:
    """A database that is created late is compacted within the longest wait."""
    database, store = await written("later")
    store.hidden.update(await stored_names(database))
    async with running(compactors([store, named("never")])):
        await passed(20 * A_WHILE_S)
        assert not store.asked("create")
        store.hidden.clear()
        await until_compacted(database, within_s=RETRY_MS_MAX / 1_000 + 5)


@virtual_time()
async def test_a_database_that_is_taken_over_is_left_alone() -> None:
    """A database that was taken over is given up and logged; the process ends with `Superseded`
    once no database is left.
    """
    (one, first), (two, second) = await written("one"), await written("two")
    role = compactors([first, second])
    with capture_logs() as lines:
        async with asyncio.TaskGroup() as tasks:
            ending = tasks.create_task(ended(role))
            await until_compacted(one, two)
            newer = await take_over(first)
            await passed(A_WHILE_S / 3)
            assert (await one.stored.refresh()).compactor_nonce == newer.own.nonce
            assert not ending.done()
            await two.write([put(b"later")])
            await until_compacted(two)
            await take_over(second)
            assert isinstance(await ending, Superseded)
    given_up = [line["url"] for line in lines if line["event"] == "database given up"]
    assert given_up == ["memory://one", "memory://two"]


@virtual_time()
async def test_what_was_taken_over_during_a_failure_is_not_taken_back() -> None:
    """A database that another compactor took over during a failure is not taken back."""
    database, store = await written("damaged")
    await damage(database, 2)
    with capture_logs() as lines:
        async with running(compactors([store, named("missing")])):
            await until(lambda: any("reason" in line for line in lines))
            newer = await take_over(store)
            await passed(A_WHILE_S)
    assert (await database.stored.refresh()).compactor_nonce == newer.own.nonce
    assert [line["url"] for line in lines if line["event"] == "database given up"] == [store.url]


@virtual_time()
async def test_an_own_claim_that_failed_after_it_landed_is_no_rival() -> None:
    """A claim that landed without a confirmation is recognized as our own by the next one."""
    _, store = await written("flaky")

    async def claimed(after: CompactorId | None) -> CompactorId:
        hurry = asyncio.Event()
        compactor = await Compactor.open(
            store, settings=EAGER, runtime=runtime(), hurry=hurry, after=after
        )
        return compactor.own

    first = await claimed(None)

    async def fail_lists(request: Request) -> None:
        if request.operation == "create":
            store.fail("list", MANIFESTS, times=EAGER.store.read_attempts)

    store.after = fail_lists
    with pytest.raises(StoreUnavailable):
        await claimed(first)
    store.after = nothing
    assert (await claimed(first)).epoch == first.epoch + 2


@virtual_time()
async def test_a_broken_disk_is_given_up() -> None:
    """A process with a broken disk ends with `StoreBroken`, although its other databases were taken
    over: a restarted process could write there.
    """
    (_, first), (two, second) = await written("one"), await written("two")
    first.fail("create", LEVELS, StoreBroken(first.url, "create", LEVELS, "sync"), times=FOR_EVER)
    async with asyncio.TaskGroup() as tasks:
        ending = tasks.create_task(ended(compactors([second, first])))
        await until_compacted(two)
        await take_over(second)
        assert isinstance(await ending, StoreBroken)


@virtual_time()
async def test_a_single_database_ends_its_process() -> None:
    """With a single database the process ends with the error of its compactor."""
    assert isinstance(await ended(compactors([named("missing")])), DatabaseNotFound)


class Crowd:
    """The largest number of jobs that read from stores at once."""

    def __init__(self, operation: str, prefix: str) -> None:
        self.working: set[str] = set()
        self.most = 0
        self._operation = operation
        self._prefix = prefix

    def watch(self, store: FaultyStore) -> None:
        async def before(request: Request) -> None:
            if request.operation == self._operation and request.name.startswith(self._prefix):
                self.working.add(store.url)
                self.most = max(self.most, len(self.working))
                await passed(0.2)
                self.working.discard(store.url)

        store.before = before


@virtual_time(orders=3)
@pytest.mark.parametrize(("operation", "prefix"), [("get", WAL), ("get_range", LEVELS)])
async def test_few_merges_run_at_once_however_many_databases_there_are(
    operation: str, prefix: str
) -> None:
    """The number of concurrent merges of the WAL, and of levels, is bounded for the process."""
    crowd, everything = Crowd(operation, prefix), [await leveled(f"d{n}") for n in range(8)]
    for _, store in everything:
        crowd.watch(store)
    async with running(compactors([store for _, store in everything])):
        await until_compacted(*(database for database, _ in everything))
        await until(lambda: all(store.asked(operation, prefix) for _, store in everything))
    assert crowd.most == MERGES_MAX


@virtual_time()
async def test_busy_databases_share_the_merges() -> None:
    """Busy databases do as many jobs as one another, and a quiet one does not wait for long."""
    busy = [await written(f"busy{n}") for n in range(5)]
    quiet, store = await written("quiet", slots=0)
    jobs: dict[str, int] = {}
    for _, each in busy:
        Crowd("get", WAL).watch(each)

    async def keep_busy(database: CompactedDatabase) -> None:
        while True:
            if not await uncompacted(database):
                await database.write([put(b"more")])
            await passed(STEP_S)

    role = compactors([*(each for _, each in busy), store], ONLY_WAL)
    async with asyncio.TaskGroup() as tasks, running(role):
        writing = [tasks.create_task(keep_busy(database)) for database, _ in busy]
        await passed(A_WHILE_S / 10)
        jobs = {each.url: len(each.asked("create", LEVELS)) for _, each in busy}
        await quiet.write([put(b"a")])
        await until_compacted(quiet, within_s=20)
        for task in writing:
            task.cancel()
    assert min(jobs.values()) > 0.7 * max(jobs.values()) > 10, jobs


@virtual_time()
@pytest.mark.parametrize(("operation", "prefix"), [("create", LEVELS), ("get", WAL)])
async def test_stores_that_hold_up_merges_do_not_keep_the_others_from_theirs(
    operation: str, prefix: str
) -> None:
    """When merges hang in all slots, because a disk is full or hangs, the other databases go on
    some minutes later.
    """
    stuck = [await written(f"stuck{n}") for n in range(MERGES_MAX)]
    others = [await written(f"other{n}", slots=0) for n in range(3)]
    for _, store in stuck:
        if operation == "create":
            store.fail("create", prefix, times=FOR_EVER)
        else:
            store.before = Gate("get", prefix, is_open=False)
    async with running(compactors([store for _, store in (*stuck, *others)])):
        await until(lambda: all(store.asked(operation, prefix) for _, store in stuck))
        for database, _ in others:
            await database.write([put(b"a")])
        await until_compacted(*(database for database, _ in others), within_s=3 * A_WHILE_S)


@virtual_time()
@pytest.mark.parametrize("count", [1, 2])
async def test_the_rate_is_for_all_databases_together(count: int) -> None:
    """All concurrent merges of levels together stay below the rate."""
    rate, rates = 1_000_001, list[float]()

    class Recorded(OwnProcessParts):
        async def run(
            self, parts: Sequence[MergePart], is_lifted: Callable[[], bool]
        ) -> Sequence[PartResult]:
            rates.extend(part.bytes_per_s for part in parts)
            return await super().run(parts, is_lifted)

    settings = small_settings(wal_trigger_bytes=1, l0_trigger_count=2, compaction_rate_bytes=rate)
    stores = [(await leveled(f"d{n}"))[1] for n in range(count)]
    async with running(compactors(stores, settings, Recorded)):
        await until(lambda: len(rates) >= count)
    assert set(rates) == {-(-rate // count)}


@virtual_time()
async def test_asked_to_stop_it_gives_up_every_lease_in_time() -> None:
    """Leases are given up concurrently: a store that does not answer costs its own timeout only."""
    (one, first), (two, second) = await written("one"), await written("two")
    gate = Gate("create", MANIFESTS)
    second.before = gate
    async with running(compactors([first, second])):
        await until_compacted(one, two)
        gate.close()
        began_ms = LoopClock().monotonic_ms()
    assert LoopClock().monotonic_ms() - began_ms < (CLOSE_S + 1) * 1_000
    assert [lease.holder for lease in (await one.stored.refresh()).leases] == []
    assert [lease.holder for lease in (await two.stored.refresh()).leases] == ["compactor"]


@virtual_time()
async def test_once_does_what_is_due_for_each() -> None:
    """Errors are returned in the order of the databases, and a permanent failure ends."""
    (one, first), (two, second) = await written("one"), await written("two")
    refused, full = await written("full")
    full.fail("create", LEVELS, times=FOR_EVER)
    role = compactors([first, named("missing"), full, second])
    async with asyncio.timeout(20 * A_WHILE_S):
        outcomes = await role.run_once()
    reasons = [each.reason if isinstance(each, ShaleError) else each for each in outcomes]
    assert reasons == [None, "DATABASE_NOT_FOUND", "STORE_UNAVAILABLE", None]
    assert [await uncompacted(each) for each in (one, refused, two)] == [0, 4, 0]


@virtual_time()
async def test_an_older_state_in_place_of_a_database_is_compacted() -> None:
    """A restored backup with an older epoch is no takeover by another compactor."""
    database, store = await written("restored")
    kept = [await store.inner.get(name) for name in await stored_names(database)]
    await damage(database, 2)
    with capture_logs() as lines:
        async with running(compactors([store, named("missing")])):
            await until(
                lambda: store.url in {line.get("url") for line in lines if "retry_ms" in line}
            )
            await store.inner.delete(await stored_names(database))
            for each in kept:
                await database.store.create(each.info.name, each.data)
            await until_compacted(database)
    assert not [line for line in lines if line["event"] == "database given up"]
