"""Retention of the log for a stream that is down or slow, and the end of a query."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from shalekv.errors import ShaleError, StoreUnavailable
from shalekv.format import names
from shalekv.settings import StoreSettings
from shalekv.store.manifests import StoredManifest
from shalekv.store.opening import open_store
from shalekv.watch.consumers import consumers_of
from shalekv.write.snapshots import Snapshots
from shalekv_client import Client
from shalekv_spark.feed.options import FeedOptions
from shalekv_spark.feed.query import LogRetention
from shalekv_spark.feed.slots import FeedWalCollected, OffsetValue
from shalekv_spark.feed.source import ChangesReader
from shalekv_spark.place import Place
from tests.kit.engine.feed_database import FeedDatabase
from tests.kit.processes.in_process import Served, real_runtime, serving

ALL = ReadAllAvailable()
NAMED = {"consumer": "totals", "consumerTtl": 60}


async def collect(database: FeedDatabase) -> None:
    database.pass_time()
    await database.collecting().collect()


async def compacted(database: FeedDatabase) -> None:
    await database.compact(database.last_wal_id)
    await collect(database)


async def test_a_consumer_keeps_what_was_not_committed() -> None:
    """A consumer keeps the WAL until it is committed; then it is collected, and later
    objects are kept.
    """
    database = await FeedDatabase.created()
    query = database.query(**NAMED)
    start = await query.initial()
    for key in (b"a", b"b", b"c"):
        await database.put(key)
    end = await query.latest(start, ALL)
    await query.parts(start, end)
    await compacted(database)
    assert [row["key"] for row in await database.rows(database.query(), start, end)] == [
        b"a",
        b"b",
        b"c",
    ]
    await query.retention.processed(2)
    await query.retention.end()
    await collect(database)
    assert names.wal_name(1) not in database.names()
    assert names.wal_name(2) in database.names()


async def test_without_a_name_nothing_is_kept() -> None:
    """Without a consumer the query fails when an object was collected, and names it."""
    database = await FeedDatabase.created()
    query = database.query()
    start = await query.initial()
    for key in (b"a", b"b", b"c"):
        await database.put(key)
    end = await query.latest(start, ALL)
    await compacted(database)
    with pytest.raises(FeedWalCollected, match=names.wal_name(0)):
        await database.query().parts(start, end)


async def test_a_name_that_is_known_goes_on_there() -> None:
    """A new query of a known consumer continues at its lease, unless a WAL id is given or
    the lease has expired.
    """
    database = await FeedDatabase.created()
    await database.put(b"a")
    query = database.query(**NAMED)
    await query.latest(await query.initial(), ALL)
    await database.put(b"b")
    assert (await database.query(**NAMED).initial()).wal_id == 1
    assert (await database.query(startingOffset="earliest", **NAMED).initial()).wal_id == 1
    assert (await database.query(startingOffset=2, **NAMED).initial()).wal_id == 2
    database.pass_time(61)
    await compacted(database)
    assert (await database.query(startingOffset="latest", **NAMED).initial()).wal_id == 2


async def test_a_first_batch_that_is_repeated_is_kept_from_where_it_began() -> None:
    """A repeated first batch is kept from its beginning, although the lease is lost and a
    new query would begin behind it.
    """
    database = await FeedDatabase.created()
    query = database.query(**NAMED)
    start = await query.initial()
    await database.put(b"a")
    end = await query.latest(start, ALL)
    await database.consumers().release("totals")
    again = database.query(**NAMED)
    moved = await again.initial()
    assert moved.wal_id == end.wal_id
    await again.parts(moved, end)
    await again.retention.end()
    found = await database.consumers().find("totals")
    assert found is not None
    assert found.wal_id_min == start.wal_id


async def test_what_cannot_be_kept_is_read_while_it_is_there() -> None:
    """Unprotected objects are read as long as they exist; the lease begins where it can."""
    database = await FeedDatabase.created()
    for key in (b"a", b"b", b"c"):
        await database.put(key)
    await database.compact(2)
    query = database.query(startingOffset="earliest", **NAMED)
    start = await query.initial()
    await query.latest(start, ALL)
    found = await database.consumers().find("totals")
    assert found is not None
    assert (start.wal_id, found.wal_id_min) == (0, 2)


async def test_files_of_a_load_are_kept_while_they_are_read() -> None:
    """Files of a load that were merged meanwhile are kept until they are processed, and not
    longer.
    """
    database = await FeedDatabase.created()
    query = database.query(**NAMED)
    start = await query.initial()
    pending = await database.load([b"a"], [b"b"])
    end = await query.latest(start, ALL)
    await query.parts(start, end)
    await database.edit(lambda manifest: replace(manifest, pending_loads=()))
    await collect(database)
    files = {names.level_name(info.id) for info in pending.ssts}
    assert files <= database.names()
    await query.retention.processed(end.wal_id - 1)
    await collect(database)
    assert files <= database.names()
    await query.retention.processed(end.wal_id)
    await collect(database)
    assert not files & database.names()


async def test_a_batch_that_is_planned_again_keeps_the_files_it_had() -> None:
    """A batch that is planned again keeps its first snapshot, since a new one would lack
    merged files.
    """
    database = await FeedDatabase.created()
    query = database.query()
    start = await query.initial()
    pending = await database.load([b"a"])
    end = await query.latest(start, ALL)
    await query.parts(start, end)
    await database.edit(lambda manifest: replace(manifest, pending_loads=()))
    assert [row["key"] for row in await database.rows(query, start, end)] == [b"a"]
    await collect(database)
    assert {names.level_name(info.id) for info in pending.ssts} <= database.names()


async def test_no_query_fails_of_a_snapshot_that_cannot_be_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A query does not fail when its snapshot cannot be deleted: it expires, as does the
    lease that it leaves.
    """
    database = await FeedDatabase.created()
    query = database.query(**NAMED)
    start = await query.initial()
    await database.load([b"a"])
    end = await query.latest(start, ALL)
    await query.parts(start, end)

    async def fail(*_: object) -> None:
        raise StoreUnavailable("memory", "list", "manifest/", "planted")

    monkeypatch.setattr(Snapshots, "delete", fail)
    await query.retention.processed(end.wal_id)
    await database.store.delete([name for name in database.names() if "manifest" in name])
    await query.retention.end()


def reader_of(url: str, **options: str) -> ChangesReader:
    return ChangesReader(FeedOptions.of({"url": url, "startingOffset": "earliest", **options}))


def batch(reader: ChangesReader, start: OffsetValue) -> tuple[OffsetValue, list[Any]]:
    """Return the end of the next batch, and its rows."""
    end = reader.latestOffset(start, ALL)
    parts = reader.partitions(start, end)
    found = [each for part in parts for each in reader.read(part)]
    return end, [row for each in found for row in each.to_pylist()]


@pytest.fixture
def threads_before() -> set[threading.Thread]:
    return {*threading.enumerate()}


def new_threads(before: set[threading.Thread]) -> list[threading.Thread]:
    return [
        each
        for each in threading.enumerate()
        if each.name.startswith("shalekv") and each not in before
    ]


@asynccontextmanager
async def served(url: str) -> AsyncIterator[Served]:
    with real_runtime() as runtime:
        store = open_store(url, runtime, StoreSettings())
        async with serving(store) as found:
            yield found


@pytest.mark.parametrize("failure", [None, TimeoutError(), RuntimeError("planted")])
async def test_a_query_that_ends_leaves_its_lease_and_nothing_else(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    threads_before: set[threading.Thread],
    failure: Exception | None,
) -> None:
    """A query that ends leaves no thread, after any error, and its lease is behind what was
    processed.
    """
    url = f"file://{tmp_path}"
    reader = reader_of(url, consumer="totals")
    async with served(url) as server, Client(server.listen) as client:
        await client.put(b"a", b"")
        start = await asyncio.to_thread(reader.initialOffset)
        end, _ = await asyncio.to_thread(batch, reader, start)
    await asyncio.to_thread(reader.commit, end)
    if failure is not None:

        async def fail(_: LogRetention) -> None:
            raise failure

        monkeypatch.setattr(LogRetention, "end", fail)
    is_bug = isinstance(failure, RuntimeError)
    with pytest.raises(RuntimeError, match="planted") if is_bug else nullcontext():
        await asyncio.to_thread(reader.stop)
    assert not new_threads(threads_before)
    async with Place.of(url).open() as store:
        [consumer] = consumers_of(await StoredManifest(store).refresh())
    assert consumer.lease.wal_id_min == (end if failure is None else start)["walId"]
    await asyncio.to_thread(reader.stop)


def test_a_store_that_cannot_be_opened_leaves_no_thread(
    monkeypatch: pytest.MonkeyPatch, threads_before: set[threading.Thread]
) -> None:
    """A query whose store cannot be opened fails at its beginning, and leaves no thread."""

    def fail(_: Place) -> None:
        raise ShaleError("planted")

    monkeypatch.setattr(Place, "open", fail)
    with pytest.raises(ShaleError, match="planted"):
        reader_of("file:///nowhere").initialOffset()
    assert not new_threads(threads_before)
