"""The contract of record stores, on which two-phase compare-and-swap rests, for every kind; and
S3 with two-phase compare-and-swap keeps the contract of object stores, whatever decides it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from uuid import uuid4

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from shalekv.errors import StoreRefused, StoreUnavailable
from shalekv.protocol.two_phase import CreateRecord, Destination
from shalekv.store.api import Created, ObjectStore, RequestKind
from shalekv.store.two_phase import sql
from shalekv.store.two_phase.records import Inserted, InsertUnknown, Occupied, RecordStore
from shalekv.store.two_phase.sql import TABLE_NAME
from tests.contract.opening import RECORDS, OpenRecords, records_opener, records_settings
from tests.contract.store_contract import HttpStoreContract, RaceContract
from tests.kit import memory_records
from tests.kit.memory_records import MemoryRecords, Table
from tests.kit.processes.in_process import real_runtime

RACERS = 4
ROUNDS = 5
PAGE = 20  # instead of the page size of memory and SQL
AT_ONCE = 40
HERE = "s3://bucket/here"


def record(name: str, source: str = "source", database: str = HERE) -> CreateRecord:
    return CreateRecord(Destination(database, name), source)


def done(open_record: CreateRecord) -> CreateRecord:
    return replace(open_record, is_committed=True)


async def listed(
    records: RecordStore, database: str = HERE, *, uncommitted_only: bool = False
) -> list[CreateRecord]:
    return [each async for each in records.list(database, uncommitted_only=uncommitted_only)]


@asynccontextmanager
async def connected(kind: str, context: pytest.FixtureRequest) -> AsyncIterator[AsyncConnection]:
    """A connection of somebody else to this server, in a transaction."""
    server = context.getfixturevalue({"mariadb": "maria"}.get(kind, kind) + "_server")
    engine = create_async_engine(server.url())
    async with engine.connect() as connection:
        yield connection
    await engine.dispose()


@pytest.fixture(params=["memory", *RECORDS])
def kind(request: pytest.FixtureRequest) -> str:
    """Kind of the record store."""
    found: str = request.param
    return found


@pytest.fixture
async def empty(kind: str, request: pytest.FixtureRequest) -> None:
    """The database of a server has no table of ours."""
    if kind in {"mariadb", "postgres"}:
        async with connected(kind, request) as connection:
            await connection.execute(text(f"DROP TABLE IF EXISTS {TABLE_NAME}"))
            await connection.commit()


@pytest.fixture
def open_records(kind: str, empty: None, request: pytest.FixtureRequest) -> Iterator[OpenRecords]:  # noqa: ARG001
    """A function whose every call opens one and the same, at first empty, table."""
    if kind == "memory":
        table: Table = {}
        yield lambda: MemoryRecords(table=table)
        return
    settings = records_settings(kind, request, f"records-{uuid4().hex}")
    with real_runtime(threads=1) as runtime:
        yield records_opener(runtime, settings)


@pytest.fixture
async def records(open_records: OpenRecords) -> AsyncIterator[RecordStore]:
    """The record store under test."""
    opened = open_records()
    yield opened
    await opened.close()


@pytest.fixture
async def rival(open_records: OpenRecords) -> AsyncIterator[RecordStore]:
    """Another one on the same table."""
    opened = open_records()
    yield opened
    await opened.close()


@pytest.fixture
async def racers(open_records: OpenRecords) -> AsyncIterator[list[RecordStore]]:
    """Some on the same table."""
    opened = [open_records() for _ in range(RACERS)]
    yield opened
    for each in opened:
        await each.close()


async def test_first_insert_wins(records: RecordStore, rival: RecordStore) -> None:
    """The first insert for a destination stays, and every later one is shown it."""
    first, second = record("wal/1", "first"), record("wal/1", "second")
    assert await records.find(first.destination) is None
    assert await records.insert(first) == Inserted()
    assert await rival.insert(second) == Occupied(first)
    assert await records.insert(first) == Occupied(first)
    assert await records.find(first.destination) == first
    assert await rival.find(first.destination) == first


async def test_races_have_one_winner(racers: list[RecordStore]) -> None:
    """One of several processes that make the table, insert, take over or commit at once, wins."""
    await asyncio.gather(*(each.ensure_schema() for each in racers))
    for number in range(ROUNDS):
        wanted = [record(f"wal/{number}", f"by {racer}") for racer in range(RACERS)]
        outcomes = await asyncio.gather(
            *(at.insert(each) for at, each in zip(racers, wanted, strict=True))
        )
        won = [
            each for each, reported in zip(wanted, outcomes, strict=True) if reported == Inserted()
        ]
        assert len(won) == 1, outcomes
        assert outcomes.count(Occupied(won[0])) == RACERS - 1, outcomes
        assert await racers[0].find(won[0].destination) == won[0]

        taken = await asyncio.gather(
            *(at.take_over(won[0], f"after {racer}") for racer, at in enumerate(racers))
        )
        assert taken.count(True) == 1, taken
        after = replace(won[0], source=f"after {taken.index(True)}")
        assert await racers[0].find(after.destination) == after

        committed, is_taken = await asyncio.gather(
            racers[0].commit(after), racers[1].take_over(after, "last")
        )
        assert committed != is_taken
        expected = done(after) if committed else replace(after, source="last")
        assert await racers[2].find(after.destination) == expected


async def test_commit_is_conditional(records: RecordStore, rival: RecordStore) -> None:
    """A commit takes effect, any number of times, if it names the source of the record."""
    own = record("wal/1", "own")
    assert not await records.commit(own)
    assert await records.find(own.destination) is None
    await records.insert(own)
    assert not await rival.commit(replace(own, source="other"))
    assert not await rival.commit(record("wal/2", "own"))
    assert await rival.find(own.destination) == own
    assert await records.commit(own)
    assert await rival.commit(own)
    assert await rival.find(own.destination) == done(own)
    assert await rival.insert(record("wal/1", "other")) == Occupied(done(own))


async def test_take_over_is_conditional(records: RecordStore, rival: RecordStore) -> None:
    """A record is taken over if it names the source that it was found with, and is open."""
    old = record("wal/1", "old")
    assert not await records.take_over(old, "new")
    await records.insert(old)
    assert not await records.take_over(replace(old, source="other"), "new")
    assert await rival.take_over(old, "new")
    assert not await records.take_over(old, "newer")
    assert not await records.commit(old)
    new = replace(old, source="new")
    assert await records.find(old.destination) == new
    assert await records.commit(new)
    assert not await rival.take_over(new, "newest")
    assert await records.find(old.destination) == done(new)


async def test_withdrawal_is_conditional(records: RecordStore, rival: RecordStore) -> None:
    """A record is withdrawn if it names the source that it was found with, and is open."""
    own = record("wal/1", "own")
    await records.withdraw(own)
    await records.insert(own)
    await rival.withdraw(replace(own, source="other"))
    await rival.withdraw(record("wal/2", "own"))
    assert await records.find(own.destination) == own
    await records.commit(own)
    await rival.withdraw(own)
    assert await records.find(own.destination) == done(own)
    await records.insert(record("wal/2", "own"))
    await rival.withdraw(record("wal/2", "own"))
    assert await listed(records) == [done(own)]


async def test_only_committed_records_are_deleted(records: RecordStore, rival: RecordStore) -> None:
    """Open records stay, a missing one is no error, and the others are gone."""
    all_of_them = [record(f"wal/{number}") for number in range(5)]
    for each in all_of_them:
        await records.insert(each)
    for each in all_of_them[:3]:
        await records.commit(each)
    doomed = [*all_of_them[1:4], record("wal/none"), record("wal/1", database="s3://other")]
    await rival.delete_committed(each.destination for each in doomed)
    await rival.delete_committed([])
    assert await listed(records) == [done(all_of_them[0]), *all_of_them[3:]]
    assert await rival.insert(record("wal/1", "again")) == Inserted()


async def test_names_compare_by_their_bytes(records: RecordStore) -> None:
    """Names that differ in case, in spaces or at their ends are others, of sources likewise."""
    names = ["wal/a", "wal/A", "wal/a ", "wal/a  ", "wal/a.", "wal/ab", "wal/a_b", "wal/a%b"]
    databases = [HERE, HERE.upper(), f"{HERE}2", f"{HERE} ", f"{HERE}%20", f"{HERE}-"]
    for each in [record(name, "Source", at) for at in databases for name in names]:
        assert await records.insert(each) == Inserted()
    for at in databases:
        expected = [record(name, "Source", at) for name in sorted(names)]
        assert await listed(records, at) == expected
    own = record("wal/a", "Source")
    for other in ("source", "Source ", "Sourc", "Sourc_", "Sourc%"):
        assert not await records.commit(replace(own, source=other))
        assert not await records.take_over(replace(own, source=other), "new")
    assert await records.find(own.destination) == own


async def test_the_longest_names_fit(records: RecordStore) -> None:
    """Destinations and sources may be as long as stores take them."""
    long = record("wal/" + 508 * "n", "wal/" + 600 * "s", database="s3://" + 1_400 * "d")
    other = record("wal/" + 507 * "n" + "m", "wal/" + 600 * "s", long.destination.database)
    assert await records.insert(long) == Inserted()
    assert await records.insert(other) == Inserted()
    assert await listed(records, long.destination.database) == [other, long]


async def test_lists_of_many_pages(
    records: RecordStore, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list shows every record of its database once, in order, the open ones if so asked."""
    for module in (memory_records, sql):
        monkeypatch.setattr(module, "PAGE_RECORDS", PAGE)
    count = 520 if kind == "dynamodb" else 2 * PAGE + 5  # DynamoDB ends a page at a megabyte
    here = HERE + 1_300 * "d"
    wanted = [record(f"wal/{n:05d}", f"{n}" + 600 * "s", here) for n in range(count)]
    committed = wanted[::3]
    for first in range(0, count, AT_ONCE):
        some = wanted[first : first + AT_ONCE]
        await asyncio.gather(*(records.insert(each) for each in some))
        await asyncio.gather(*(records.commit(each) for each in some if each in committed))
    is_committed = {each.destination for each in committed}
    await records.insert(record("wal/00000", database=f"{here}/nested"))
    await records.insert(record("wal/00000", database=f"{here}2"))
    assert await listed(records, here) == [
        done(each) if each.destination in is_committed else each for each in wanted
    ]
    assert await listed(records, here, uncommitted_only=True) == [
        each for each in wanted if each.destination not in is_committed
    ]
    assert await listed(records, "s3://bucket") == []


async def test_a_list_while_records_change(records: RecordStore, rival: RecordStore) -> None:
    """The open records of a list may be committed as they come."""
    wanted = [record(f"wal/{number:02d}") for number in range(20)]
    for each in wanted:
        await records.insert(each)
    seen = []
    async for each in records.list(HERE, uncommitted_only=True):
        seen.append(each)
        await rival.commit(each)
    assert seen == wanted
    assert await listed(records, uncommitted_only=True) == []


async def test_records_outlive_their_writer(open_records: OpenRecords) -> None:
    """A table that is opened later has the records. One insert, one commit and one read are two
    writes and one read; the URL has no secrets.
    """
    first = open_records()
    await first.ensure_schema()
    await first.ensure_schema()
    kept = record("wal/1")
    await first.insert(kept)
    await first.commit(kept)
    await first.find(kept.destination)
    assert first.sent.by_kind[RequestKind.RECORD_WRITE] == 2
    assert first.sent.by_kind[RequestKind.RECORD_READ] == 1
    assert "@" not in first.url
    assert "://" in first.url
    await first.close()
    second = open_records()
    assert await listed(second) == [done(kept)]
    await second.close()


async def test_a_cancelled_insert_leaves_the_store_usable(records: RecordStore) -> None:
    """An insert that was cancelled is found or not, and other inserts go on."""
    await records.ensure_schema()
    for number in range(20):
        wanted = record(f"wal/{number}")
        task = asyncio.create_task(records.insert(wanted))
        for _ in range(number):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert await records.find(wanted.destination) in (None, wanted)
        assert await records.insert(wanted) in (Inserted(), Occupied(wanted))


INSERT = (
    "INSERT INTO shalekv_records ({}, destination, source, committed) "
    "VALUES ('s3://bucket/here', 'wal/1', 'theirs', FALSE)"
)
# How a rival inserts, finds the connection that waits for it, and cuts that connection.
CUTS = {
    "mariadb": (
        INSERT.format("`database`"),
        "SELECT id FROM information_schema.processlist WHERE info LIKE 'INSERT INTO shale%'",
        "KILL CONNECTION {}",
    ),
    "postgres": (
        INSERT.format("database"),
        "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock'",
        "SELECT pg_terminate_backend({})",
    ),
}


@pytest.mark.parametrize("kind", CUTS)
async def test_a_connection_that_is_cut(
    records: RecordStore, kind: str, request: pytest.FixtureRequest
) -> None:
    """An insert whose connection the server cuts is in doubt; the next has another connection."""
    insert, waiting, kill = CUTS[kind]
    found = None
    async with connected(kind, request) as other:
        await records.ensure_schema()
        await other.execute(text(insert))
        inserting = asyncio.create_task(records.insert(record("wal/1", "ours")))
        while found is None:
            await asyncio.sleep(0)
            found = (await other.execute(text(waiting))).scalar()
        await other.execute(text(kill.format(found)))
        assert isinstance(await inserting, InsertUnknown)
        await other.rollback()
    assert await records.find(record("wal/1").destination) is None
    assert await records.insert(record("wal/1", "ours")) == Inserted()


@pytest.mark.parametrize("kind", ["postgres"])
async def test_a_table_that_was_dropped(
    records: RecordStore, kind: str, request: pytest.FixtureRequest
) -> None:
    """A table that goes away is not made again under a running process: that would free names."""
    await records.insert(record("wal/1"))
    async with connected(kind, request) as other:
        await other.execute(text("DROP TABLE shalekv_records"))
        await other.commit()
    with pytest.raises((StoreRefused, StoreUnavailable), match="does not exist"):
        await records.insert(record("wal/1"))


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("minio+sqlite", marks=pytest.mark.soak)])
class TestDecidedBySqlite(HttpStoreContract):
    rounds = 4
    many = 60  # lists and reads are those of the plain store

    async def test_a_create_has_its_price(self, store: ObjectStore) -> None:
        """A create is two puts, two writes of records and one delete, when all goes well."""
        await store.repair()
        before = dict(store.sent.by_kind)
        assert await store.create("wal/1.sst", b"1") == Created()
        spent = {kind: store.sent.by_kind[kind] - before[kind] for kind in RequestKind}
        assert {kind: count for kind, count in spent.items() if count} == {
            RequestKind.WRITE: 2,
            RequestKind.RECORD_WRITE: 2,
            RequestKind.DELETE: 1,
        }


@pytest.mark.parametrize("kind", ["mariadb", "postgres", "dynamodb"])
class TestDecidedByServers(RaceContract):
    racers = 3
    rounds = 4
