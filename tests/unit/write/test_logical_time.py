"""Logical time when clocks are wrong: at an opening, while a writer serves, and after a repair."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from shalekv.clock import LoopClock
from shalekv.errors import Fenced, ImplausibleTime, KeyExpired, StoreUnavailable
from shalekv.protocol.audit import succession_findings
from shalekv.protocol.manifest import WalMode
from shalekv.runtime import Runtime
from shalekv.server.database import create_database
from shalekv.settings import CLOCK_JUMP_MAX_S, StoreSettings, WriterSettings
from shalekv.store.cas import CasStore
from shalekv.store.memory import MemoryStore
from shalekv.write.engine import WriterEngine
from shalekv.write.idempotency import Idempotency
from shalekv.write.logical_time import READING_MS, LogicalTime, first_time
from shalekv.write.opening import open_log
from shalekv.write.recovery import RecoveredLog
from shalekv.write.repair_time import TimeFound, read_time, repair_time
from tests.kit.inline_runtime import InlineWorkers
from tests.kit.quorum.links import InProcessLinks
from tests.kit.quorum.log import QuorumDatabase, Writing, until
from tests.kit.serving.sweeping import compact_store
from tests.kit.store import STORE_NOW_MS
from tests.kit.virtual_time import virtual_time

DAY_MS = 86_400_000
ANY_JUMP = {"clock_jump_max_s": 3_153_600_000}


class SetClock(LoopClock):
    """The clock of a machine: `ahead_ms` is its error, `suspended_ms` what lapsed unseen."""

    def __init__(self, ahead_ms: int = 0) -> None:
        self.ahead_ms = ahead_ms
        self.passed_ms = 0  # beside the time of the loop
        self.suspended_ms = 0

    def loop_ms(self) -> float:
        return super().monotonic_ms()

    @property
    def true_ms(self) -> int:
        return STORE_NOW_MS + self.passed_ms + int(self.loop_ms())

    def monotonic_ms(self) -> float:
        return self.loop_ms() + self.passed_ms - self.suspended_ms

    def wall_ms(self) -> int | None:
        return self.true_ms + self.ahead_ms


class ClockedDatabase(QuorumDatabase):
    """A database in an object store of this process, of either WAL mode."""

    def __init__(self, seed: int = 0) -> None:
        self.clock = SetClock()
        self.store_ahead_ms = 0
        super().__init__(seed)

    def store_now_ms(self) -> int:
        return self.clock.true_ms + self.store_ahead_ms

    def another_store(self) -> MemoryStore:
        store = MemoryStore(self.store_now_ms, objects=self.objects)
        store.url = "s3://clocked"  # it has a clock of its own
        return store

    def runtime(self) -> Runtime:
        return Runtime(self.clock, Random(self._seeds.getrandbits(64)), InlineWorkers())

    def cas(self) -> CasStore:
        return CasStore(self.another_store(), self.runtime(), StoreSettings())

    async def open_at(self, links: InProcessLinks | None = None, **settings: Any) -> RecoveredLog:
        """Open it for writing, by the clocks as they are set."""
        writer = WriterSettings.model_validate({"flush_interval_ms": 0} | settings)
        return await open_log(self.cas(), writer, address="here:1", links=links)

    async def repair(self, links: InProcessLinks) -> TimeFound:
        return await repair_time(self.cas(), links, CLOCK_JUMP_MAX_S)


async def create_at(database: ClockedDatabase) -> None:
    """Create it, by the clocks as they are set."""
    await create_database(database.another_store(), database.runtime(), StoreSettings())


class StandingClock(SetClock):
    """A clock that only the test moves; there is no loop."""

    def loop_ms(self) -> float:
        return 0.0


JUMP_MAX_MS = CLOCK_JUMP_MAX_S * 1_000
IN_BOTH_MODES = pytest.mark.parametrize("mode", [WalMode.OBJECT_STORE, WalMode.QUORUM])


async def created(mode: WalMode) -> tuple[ClockedDatabase, InProcessLinks]:
    make = ClockedDatabase.created if mode is WalMode.QUORUM else ClockedDatabase.in_object_store
    database = await make()
    return database, database.links()


async def write(
    database: ClockedDatabase, opened: RecoveredLog, links: InProcessLinks, *keys: bytes
) -> None:
    """Write these keys with this writer, which then stops; everything written is archived."""
    writing = Writing(opened, links)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(writing.run())
        for key in keys:
            await writing.put(key)
        writing.engine.close()
        while not running.done():
            await database.archive()
            await database.clock.sleep_ms(10)


@IN_BOTH_MODES
@pytest.mark.parametrize("ahead_ms", [10 * DAY_MS, -10 * DAY_MS])
@virtual_time()
async def test_an_unconfirmed_clock_is_refused(mode: WalMode, ahead_ms: int) -> None:
    """A store's clock that is days off opens and creates no database, unless a flag accepts it."""
    database, links = await created(mode)
    before = await database.manifest()
    database.store_ahead_ms = ahead_ms
    with pytest.raises(ImplausibleTime, match=r"2023-11-14 .*larger --clock-jump-max-s"):
        await database.open_at(links)
    assert await database.manifest() == before
    new = ClockedDatabase()
    new.store_ahead_ms = ahead_ms
    with pytest.raises(ImplausibleTime, match="there is no commit yet"):
        await create_at(new)
    await database.open_at(links, **ANY_JUMP)


@IN_BOTH_MODES
@virtual_time()
async def test_two_sources_that_agree_are_believed(mode: WalMode) -> None:
    """The store's clock is confirmed by the machine's clock or by the last commit."""
    database, links = await created(mode)
    database.clock.passed_ms = 200 * DAY_MS
    opened = await database.open_at(links)
    assert opened.time.now_ms() == pytest.approx(database.store_now_ms(), abs=1_000)
    await write(database, opened, links, b"a")
    database.clock.ahead_ms = -200 * DAY_MS
    database.clock.passed_ms += JUMP_MAX_MS // 2
    await database.open_at(links)  # the last commit is not compacted, so only the log has its time
    database.clock.passed_ms += JUMP_MAX_MS
    with pytest.raises(ImplausibleTime):
        await database.open_at(links)


@virtual_time()
async def test_an_opening_that_writes_nothing_leaves_no_time() -> None:
    """The logical time of a fence is not used: it has decided nothing."""
    database, links = await created(WalMode.OBJECT_STORE)
    database.store_ahead_ms = 10 * DAY_MS
    await database.open_at(links, **ANY_JUMP)
    database.store_ahead_ms = 0
    opened = await database.open_at(links)
    assert opened.time.now_ms() == pytest.approx(database.store_now_ms(), abs=1_000)
    await compact_store(database.another_store(), database.runtime())
    assert (await database.manifest()).logical_time_ms <= database.store_now_ms()


def test_a_writer_follows_the_store() -> None:
    """Logical time follows small jumps, and those the machine confirms; it never goes back."""
    clock = StandingClock()
    time = LogicalTime(clock, store_now_ms=clock.true_ms, jump_max_ms=JUMP_MAX_MS)
    start_ms = time.now_ms()
    time.follow(start_ms + 5_000, 0)
    assert time.now_ms() == start_ms + 5_000
    time.follow(start_ms, 0)
    assert time.now_ms() == start_ms + 5_000
    clock.passed_ms = 6_000
    assert time.now_ms() == start_ms + 6_000
    for jump_ms in (10 * DAY_MS, -10 * DAY_MS):
        time.follow(clock.true_ms + jump_ms, 0)
        assert time.now_ms() == start_ms + 6_000
    clock.passed_ms = clock.suspended_ms = DAY_MS  # only the time of day shows that
    time.follow(clock.true_ms, 0)
    assert time.now_ms() == start_ms + DAY_MS


def test_whole_seconds_move_no_time() -> None:
    """Coarse and late readings do not disturb logical time; lifetimes of snapshots follow them."""
    clock = StandingClock()
    recorded_ms = clock.true_ms // 1_000 * 1_000
    time = LogicalTime(clock, store_now_ms=recorded_ms, jump_max_ms=JUMP_MAX_MS)
    for passed_ms in range(0, 10_000, 370):
        clock.passed_ms = passed_ms
        for took_ms in (0, 4_000):
            at_ms = (clock.true_ms - took_ms) // 1_000 * 1_000
            assert time.follow(at_ms, took_ms) == at_ms
            assert time.now_ms() == recorded_ms + passed_ms


def test_a_store_with_the_machines_clock_confirms_nothing() -> None:
    """On file:// the two clocks are one, so setting it days ahead does not move logical time."""
    clock = StandingClock()
    time = LogicalTime(
        clock, store_now_ms=clock.true_ms, jump_max_ms=JUMP_MAX_MS, has_other_clock=False
    )
    clock.ahead_ms = 10 * DAY_MS
    time.follow(clock.true_ms + 10 * DAY_MS, 0)
    assert time.now_ms() == clock.true_ms


FAILS = "fails after 10 s"


class SlowClockStore(MemoryStore):
    """A store that answers so many milliseconds after it has read its clock, or fails."""

    def __init__(self, database: ClockedDatabase, answers: Sequence[int | str]) -> None:
        super().__init__(database.store_now_ms)
        self.url = "s3://clocked"
        self.asked = 0
        self._clock = database.clock
        self._answers = answers

    async def now_ms(self) -> int:
        answer = self._answers[self.asked]
        self.asked += 1
        if isinstance(answer, str):
            await self._clock.sleep_ms(10_000)
            raise StoreUnavailable(self.url, "read", "the clock", answer)
        recorded_ms = await super().now_ms()
        await self._clock.sleep_ms(answer)
        return recorded_ms


@pytest.mark.parametrize(
    ("answers", "asked", "behind_ms"),
    [
        ([READING_MS], 1, READING_MS),
        ([READING_MS + 1, 0], 2, 0),
        ([60_000, 50_000, 0], 3, 0),
        ([9_000, 5_000, 4_000], 3, 4_000),
        ([5_000, 9_000, 60_000], 3, 5_000),  # the others are given up after 5 s
        ([9_000, 60_000, 0], 3, 0),
        ([5_000, FAILS, FAILS], 3, 5_000),
        ([30_000, FAILS, 0, 0], 4, 0),
        ([200_000, *[FAILS] * 8, 0], 10, 0),  # the second reading fails for good
        ([FAILS, 0, 5_000, 6_000], 4, 0),  # the first request was repeated, and its answer is new
    ],
)
@virtual_time()
async def test_a_late_reading_is_taken_again(
    answers: list[int | str], asked: int, behind_ms: int
) -> None:
    """An opening reads the clock up to three times, and uses the latest time."""
    database = ClockedDatabase()
    store = SlowClockStore(database, answers)
    cas = CasStore(store, database.runtime(), StoreSettings())
    time = await first_time(cas, None, CLOCK_JUMP_MAX_S)
    assert store.asked == asked
    assert time.now_ms() == pytest.approx(database.store_now_ms() - behind_ms, abs=1)


@virtual_time()
async def test_an_unreadable_clock_opens_nothing() -> None:
    """The error of the first reading is raised when all its requests have failed."""
    database = ClockedDatabase()
    store = SlowClockStore(database, [FAILS] * 99)
    cas = CasStore(store, database.runtime(), StoreSettings(read_attempts=2))
    with pytest.raises(StoreUnavailable, match=FAILS):
        await first_time(cas, None, CLOCK_JUMP_MAX_S)
    assert store.asked == 2


@virtual_time()
async def test_the_store_is_asked_while_a_writer_serves() -> None:
    """Each renewal of the snapshots reads the store's clock, without a request of its own."""
    database, links = await created(WalMode.OBJECT_STORE)
    opened = await database.open_at(links, snapshot_ttl_s=60)
    engine = WriterEngine(
        opened, WriterSettings(flush_interval_ms=0, snapshot_ttl_s=60), database.clock
    )
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(engine.run(stop_grace_ms=0))
        database.store_ahead_ms = JUMP_MAX_MS // 2
        await until(lambda: engine.time.now_ms() >= database.store_now_ms() - 1_000)
        engine.close()


@IN_BOTH_MODES
@pytest.mark.parametrize("is_compacted", [False, True])
@virtual_time()
async def test_a_damaged_database_is_repaired(mode: WalMode, is_compacted: bool) -> None:  # noqa: FBT001
    """Values that a wrong clock had expired are back after a repair, and expire in time."""
    database, links = await created(mode)
    opened = await database.open_at(links)
    expires_ms = opened.time.now_ms() + 3 * DAY_MS
    await write(database, opened, links, b"before")
    database.store_ahead_ms = 10 * DAY_MS
    await write(database, await database.open_at(links, **ANY_JUMP), links, b"under it")
    database.store_ahead_ms = 0
    if is_compacted:
        await compact_store(database.another_store(), database.runtime())

    damaged = await database.open_at(links)
    assert damaged.time.now_ms() > expires_ms
    with pytest.raises(KeyExpired):
        keyed_write(damaged, database.store_now_ms())
    found = await read_time(database.cas(), CLOCK_JUMP_MAX_S)
    assert found.ahead_ms == pytest.approx(10 * DAY_MS, abs=60_000)

    before = await database.manifest()
    assert (await database.repair(links)).needs_repair
    repaired = await database.manifest()
    assert [*succession_findings("manifest", before, repaired)] == []
    compacted = replace(before, logical_time_ms=found.logical_time_ms)
    assert [*succession_findings("manifest", compacted, repaired)] == []
    unsaid = replace(repaired, time_reset_wal_id=before.time_reset_wal_id)
    assert len([*succession_findings("manifest", compacted, unsaid)]) == 1
    with pytest.raises(Fenced):
        await damaged.manifest.refresh()
    for _ in range(2):  # with the log, and compacted
        opened = await database.open_at(links)
        assert opened.time.now_ms() == pytest.approx(database.store_now_ms(), abs=1_000)
        keyed_write(opened, database.store_now_ms())
        await write(database, opened, links, b"after")
        await compact_store(database.another_store(), database.runtime())
        assert (await database.manifest()).logical_time_ms <= database.store_now_ms()
    assert (await read_time(database.cas(), CLOCK_JUMP_MAX_S)).ahead_ms == 0


@pytest.mark.parametrize("ahead_ms", [0, 10 * DAY_MS])
@virtual_time()
async def test_times_that_only_safekeepers_have_are_repaired(ahead_ms: int) -> None:
    """Times that are not archived yet are repaired; a time that is right is unchanged."""
    database, links = await created(WalMode.QUORUM)
    database.store_ahead_ms = ahead_ms
    opened = await database.open_at(links, **ANY_JUMP)
    writing = Writing(opened, links)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(writing.run())
        await writing.put(b"under it")
        writing.engine.close()
    database.store_ahead_ms = 0
    looked = await read_time(database.cas(), CLOCK_JUMP_MAX_S)
    assert (looked.needs_repair, looked.is_whole) == (False, False)

    assert (await database.repair(links)).needs_repair == bool(ahead_ms)
    assert bool((await database.manifest()).time_reset_wal_id) == bool(ahead_ms)
    opened = await database.open_at(links)
    assert opened.time.now_ms() == pytest.approx(database.store_now_ms(), abs=1_000)


def keyed_write(opened: RecoveredLog, made_ms: int) -> None:
    """Ask whether a key that a client makes now can be used; raises `KeyExpired`."""
    known = Idempotency(window_ms=DAY_MS, now_ms=opened.time.now_ms)
    head = made_ms.to_bytes(6, "big")
    assert known.find(head + b"\x70\x00\x80" + bytes(7), b"hash") is None
