"""The contract of record stores: what two-phase compare-and-swap rests on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from shalekv.core.two_phase import Destination, Record
from shalekv.store.requests import RequestKind
from shalekv.store.two_phase.records import Inserted, Occupied, RecordStore

OpenRecords = Callable[[], RecordStore]

RACERS = 8
ROUNDS = 50
MANY = 1_010  # more than a page
AT_ONCE = 40
HERE = "s3://bucket/here"


def record(name: str, source: str = "source", database: str = HERE) -> Record:
    """A record that is not committed."""
    return Record(Destination(database, name), source)


def done(open_record: Record) -> Record:
    """The same, committed."""
    return replace(open_record, is_committed=True)


async def listed(
    records: RecordStore, database: str = HERE, *, uncommitted_only: bool = False
) -> list[Record]:
    """All that a list shows."""
    return [each async for each in records.list(database, uncommitted_only=uncommitted_only)]


class RecordContract:
    """All of the contract. A subclass with an `open_records` fixture tests a record store."""

    @pytest.fixture
    def open_records(self) -> OpenRecords:
        """A function whose every call opens one and the same, at first empty, table."""
        raise AssertionError("a class that tests a record store overrides this fixture")

    @pytest.fixture
    async def records(self, open_records: OpenRecords) -> AsyncIterator[RecordStore]:
        """The record store under test."""
        opened = open_records()
        yield opened
        await opened.close()

    @pytest.fixture
    async def rival(self, open_records: OpenRecords) -> AsyncIterator[RecordStore]:
        """Another one on the same table."""
        opened = open_records()
        yield opened
        await opened.close()

    async def test_first_insert_wins(self, records: RecordStore, rival: RecordStore) -> None:
        """The first insert for a destination stays, and every later one is shown it."""
        first, second = record("wal/1", "first"), record("wal/1", "second")
        assert await records.find(first.destination) is None
        assert await records.insert(first) == Inserted()
        assert await rival.insert(second) == Occupied(first)
        assert await records.insert(first) == Occupied(first)
        assert await records.find(first.destination) == first
        assert await rival.find(first.destination) == first

    async def test_insert_races_have_one_winner(self, open_records: OpenRecords) -> None:
        """Of eight inserts for one destination at once, one wins, and all others are shown it."""
        racers = [open_records() for _ in range(RACERS)]
        for number in range(ROUNDS):
            wanted = [record(f"wal/{number}", f"by {racer}") for racer in range(RACERS)]
            outcomes = await asyncio.gather(
                *(at.insert(each) for at, each in zip(racers, wanted, strict=True))
            )
            winners = [i for i, outcome in enumerate(outcomes) if outcome == Inserted()]
            assert len(winners) == 1, outcomes
            assert outcomes.count(Occupied(wanted[winners[0]])) == RACERS - 1, outcomes
            assert await racers[0].find(wanted[0].destination) == wanted[winners[0]]
        for racer in racers:
            await racer.close()

    async def test_take_over_races_have_one_winner(self, open_records: OpenRecords) -> None:
        """Of eight that take one record over at once, one does."""
        racers = [open_records() for _ in range(RACERS)]
        for number in range(ROUNDS):
            dead = record(f"wal/{number}", "dead")
            await racers[0].insert(dead)
            outcomes = await asyncio.gather(
                *(at.take_over(dead, f"by {racer}") for racer, at in enumerate(racers))
            )
            assert outcomes.count(True) == 1, outcomes
            winner = outcomes.index(True)
            assert await racers[0].find(dead.destination) == replace(dead, source=f"by {winner}")
        for racer in racers:
            await racer.close()

    async def test_commit_or_take_over(self, open_records: OpenRecords) -> None:
        """Of a commit and a take-over at once, one happens."""
        one, other = open_records(), open_records()
        for number in range(ROUNDS):
            before = record(f"wal/{number}", "before")
            await one.insert(before)
            committed, taken = await asyncio.gather(
                one.commit(before), other.take_over(before, "after")
            )
            assert committed != taken
            found = await one.find(before.destination)
            assert found == (done(before) if committed else replace(before, source="after"))
        await one.close()
        await other.close()

    async def test_commit_is_conditional(self, records: RecordStore, rival: RecordStore) -> None:
        """A record is committed by whoever knows its source, as often as it wants, and no other."""
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

    async def test_take_over_is_conditional(self, records: RecordStore, rival: RecordStore) -> None:
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

    async def test_withdrawal_is_conditional(
        self, records: RecordStore, rival: RecordStore
    ) -> None:
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

    async def test_only_committed_records_are_deleted(
        self, records: RecordStore, rival: RecordStore
    ) -> None:
        """What is open stays, what no record has is no error, and the rest is gone."""
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

    async def test_destinations_compare_by_their_bytes(self, records: RecordStore) -> None:
        """Names that differ in case, in spaces or at their ends are different destinations."""
        names = ["wal/a", "wal/A", "wal/a ", "wal/a  ", "wal/a.", "wal/ab", "wal/a_b", "wal/a%b"]
        databases = [HERE, HERE.upper(), f"{HERE}2", f"{HERE} ", f"{HERE}%20", f"{HERE}-"]
        wanted = [record(name, database=at) for at in databases for name in names]
        for each in wanted:
            assert await records.insert(each) == Inserted()
        for at in databases:
            expected = [record(name, database=at) for name in sorted(names)]
            assert await listed(records, at) == expected

    async def test_sources_compare_by_their_bytes(self, records: RecordStore) -> None:
        """A source that only resembles that of the record is another one."""
        own = record("wal/1", "Source")
        await records.insert(own)
        for other in ("source", "Source ", "Sourc", "Sourc_", "Sourc%"):
            assert not await records.commit(replace(own, source=other))
            assert not await records.take_over(replace(own, source=other), "new")
        assert await records.find(own.destination) == own

    async def test_the_longest_names_fit(self, records: RecordStore) -> None:
        """Destinations and sources may be as long as stores take them."""
        long = record("wal/" + 508 * "n", "wal/" + 600 * "s", database="s3://" + 1_400 * "d")
        other = record("wal/" + 507 * "n" + "m", "wal/" + 600 * "s", long.destination.database)
        assert await records.insert(long) == Inserted()
        assert await records.insert(other) == Inserted()
        assert await listed(records, long.destination.database) == [other, long]

    async def test_lists_of_many_pages(self, open_records: OpenRecords) -> None:
        """A list shows every record of its database once, in order, the open ones if so asked."""
        records = open_records()
        here = HERE + 1_100 * "d"  # DynamoDB ends a page at a megabyte
        wanted = [record(f"wal/{number:05d}", f"s{number}", here) for number in range(MANY)]
        committed = wanted[::3]
        for first in range(0, MANY, AT_ONCE):
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
        await records.close()

    async def test_a_list_while_records_change(
        self, records: RecordStore, rival: RecordStore
    ) -> None:
        """Whoever goes through open records may commit each as it comes."""
        wanted = [record(f"wal/{number:02d}") for number in range(20)]
        for each in wanted:
            await records.insert(each)
        seen = []
        async for each in records.list(HERE, uncommitted_only=True):
            seen.append(each)
            await rival.commit(each)
        assert seen == wanted
        assert await listed(records, uncommitted_only=True) == []

    async def test_records_outlive_who_wrote_them(self, open_records: OpenRecords) -> None:
        """What was answered is found by whoever opens the table later."""
        first = open_records()
        await first.ensure_schema()
        await first.ensure_schema()
        kept = record("wal/1")
        await first.insert(kept)
        await first.commit(kept)
        await first.close()
        second = open_records()
        assert await listed(second) == [done(kept)]
        await second.close()

    async def test_the_schema_can_be_made_by_many_at_once(self, open_records: OpenRecords) -> None:
        """Processes that start together all find a table."""
        started = [open_records() for _ in range(RACERS)]
        await asyncio.gather(*(each.ensure_schema() for each in started))
        outcomes = await asyncio.gather(*(each.insert(record("wal/1")) for each in started))
        assert outcomes.count(Inserted()) == 1
        for each in started:
            await each.close()

    async def test_a_cancelled_insert_leaves_the_store_usable(self, records: RecordStore) -> None:
        """Whoever gives an insert up finds it there or not, and can go on."""
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

    async def test_requests_are_counted(self, records: RecordStore) -> None:
        """One insert, one commit and one read are two writes and one read."""
        await records.ensure_schema()
        own = record("wal/1")
        await records.insert(own)
        await records.commit(own)
        await records.find(own.destination)
        counts = records.sent.by_kind
        assert counts[RequestKind.RECORD_WRITE] == 2
        assert counts[RequestKind.RECORD_READ] == 1

    async def test_the_url_has_no_credentials(self, records: RecordStore) -> None:
        """The URL can stand in a log."""
        assert "@" not in records.url
        assert "://" in records.url
