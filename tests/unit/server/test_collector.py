"""The collector role: several databases, failures, and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from shalekv.errors import DatabaseNotFound, StoreBroken, StoreUnavailable
from shalekv.jobs.collect import CollectReport
from shalekv.server.collector import Collector
from shalekv.settings import StoreSettings
from shalekv.store.memory import MemoryStore
from tests.kit.engine.collection import CollectedDatabase
from tests.kit.engine.running_log import YieldingClock
from tests.kit.store import FaultyStore
from tests.kit.timeouts import until


def failing(error: Exception) -> FaultyStore:
    """A store that fails when it is asked for the time."""
    store = FaultyStore(MemoryStore(lambda: 0))
    store.fail("now_ms", error=error, times=10**6)
    return store


async def collected_until(role: Collector, condition: Callable[[], bool]) -> None:
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(role.run())
        await until(condition, "collections")
        running.cancel()


async def with_garbage() -> CollectedDatabase:
    database = await CollectedDatabase.created()
    await database.wal(4)
    await database.compact(3)
    await database.merge()
    database.pass_time()
    return database


async def test_one_failing_database_does_not_stop_the_others() -> None:
    """Each database is collected, and the errors of those that fail are returned."""
    first, second = await with_garbage(), await with_garbage()
    missing = CollectedDatabase()
    databases = [first.collecting(), missing.collecting(), second.collecting()]
    role = Collector(databases, YieldingClock(), interval_ms=1_000)
    outcomes = await role.run_once()
    assert [type(outcome) for outcome in outcomes] == [
        CollectReport,
        DatabaseNotFound,
        CollectReport,
    ]
    assert role.done.get("collections", "ok") == 2
    assert role.done.get("collections", "failed") == 1
    deleted = [each.deleted_objects for each in outcomes if isinstance(each, CollectReport)]
    assert role.done.get("collected_objects") == sum(deleted) > 0
    for database in (first, second):
        assert database.names() == await database.needed()


async def test_collections_are_repeated_whatever_failed() -> None:
    """A database that does not answer is tried again; others are collected meanwhile."""
    database = await with_garbage()
    answering = FaultyStore(database.store)
    unavailable = failing(StoreUnavailable("memory://", "now_ms", "", "no answer"))
    databases = [database.collecting(answering), database.collecting(unavailable)]
    role = Collector(databases, YieldingClock(), interval_ms=1_000)
    asked_min = 5 * StoreSettings().read_attempts
    await collected_until(
        role,
        lambda: len(answering.asked("now_ms")) > 5 and len(unavailable.asked("now_ms")) > asked_min,
    )
    assert database.names() == await database.needed()


async def test_store_that_is_broken_is_given_up() -> None:
    """The role ends when the store of its last database is broken."""
    broken = [failing(StoreBroken("memory://", "now_ms", "", f"sync {n}")) for n in range(2)]
    role = Collector(
        [CollectedDatabase().collecting(store) for store in broken],
        YieldingClock(),
        interval_ms=1_000,
    )
    with pytest.raises(StoreBroken, match="sync 0"):
        await role.run()
    assert [len(store.asked("now_ms")) for store in broken] == [1, 1]


async def test_broken_store_does_not_end_the_others() -> None:
    """A broken store of one database does not stop the collection of others."""
    database = await with_garbage()
    answering = FaultyStore(database.store)
    broken = failing(StoreBroken("memory://", "now_ms", "", "sync failed"))
    databases = [database.collecting(broken), database.collecting(answering)]
    role = Collector(databases, YieldingClock(), interval_ms=1_000)
    with capture_logs() as lines:
        await collected_until(role, lambda: len(answering.asked("now_ms")) > 5)
    assert len(broken.asked("now_ms")) == 1
    assert [line["url"] for line in lines if line["event"] == "database given up"] == [broken.url]


async def test_an_error_that_nobody_expects_does_not_end_the_others() -> None:
    """An unexpected error is logged with its traceback, and the database is tried again."""
    first, second = await with_garbage(), await with_garbage()
    answering = FaultyStore(second.store)
    strange = FaultyStore(first.store)
    strange.fail("now_ms", error=KeyError("a bug"))
    databases = [first.collecting(strange), second.collecting(answering)]
    role = Collector(databases, YieldingClock(), interval_ms=1_000)
    with capture_logs() as lines:
        await collected_until(role, lambda: len(answering.asked("now_ms")) > 5)
    (failed,) = [line for line in lines if "unexpected" in line["event"]]
    assert isinstance(failed["exc_info"], KeyError)
    assert first.names() == await first.needed()
