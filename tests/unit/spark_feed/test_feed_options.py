"""The options of a stream of changes, and its offsets."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxFiles

from shalekv.errors import IllegalState, InvalidRequest, InvalidSetting, InvalidUrl
from shalekv.format.columns import columns_of
from shalekv.format.records import load_entry
from shalekv.protocol.entry import Entry, KeyRange, Kind
from shalekv_spark.feed import rows as feed_rows
from shalekv_spark.feed.options import ALL_KEYS, NO_LIMIT
from shalekv_spark.feed.rows import ARROW_SCHEMA, BatchBuilder, read_part
from shalekv_spark.feed.slots import FeedOffset, FeedWalCollected, LoadPart, SlotsPart
from shalekv_spark.feed.source import SCHEMA
from tests.kit.engine.feed_database import EPOCH, FeedDatabase, feed_options


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"maxWalFiles": 1}, "unknown option maxwalfiles"),
        ({"startingOffset": "oldest"}, "startingOffset"),
        ({"startingOffset": -1}, "startingOffset"),
        ({"maxWalFilesPerTrigger": 0}, "maxWalFilesPerTrigger"),
        ({"maxBytesPerTrigger": "1g"}, "maxBytesPerTrigger"),
        ({"consumer": " x"}, "consumer"),
        ({"consumer": "x", "consumerTtl": 1}, "consumerTtl"),
        ({"consumer": "x", "consumerTtl": 1 << 40}, "consumerTtl"),
        ({"prefix": "a", "end": "b"}, "prefix"),
        ({"start": "b", "end": "a"}, "end"),
        ({"start": "zz", "keyEncoding": "hex"}, "start"),
        ({"keyEncoding": "latin-1"}, "keyEncoding"),
        ({"url": ""}, "url"),
        ({"url": "memory://"}, "memory"),
    ],
)
def test_bad_options_are_refused_by_name(given: dict[str, object], problem: str) -> None:
    """An invalid option is refused by name, before any request to a store."""
    with pytest.raises((InvalidSetting, InvalidUrl), match=problem):
        feed_options(**given)


def test_key_options_become_a_range() -> None:
    """Options of keys become a range, decoded by the given encoding."""
    assert feed_options(prefix="a").keys == KeyRange(b"a", b"b")
    assert feed_options(start="ff00", keyEncoding="HEX").keys == KeyRange(b"\xff\x00", b"")


def test_a_trigger_may_want_all_there_is() -> None:
    """A trigger that takes everything overrides the options; a limit of Spark overrides one
    of them.
    """
    options = feed_options(maxWalFilesPerTrigger=5, maxBytesPerTrigger=6)
    assert options.limits(ReadAllAvailable()) == (NO_LIMIT, NO_LIMIT)
    assert options.limits(ReadMaxFiles(4)) == (4, 6)
    assert options.limits(ReadMaxBytes(3)) == (5, 3)
    assert feed_options(maxWalFilesPerTrigger=1 << 70).files_max == NO_LIMIT  # the maximum of Spark


@pytest.mark.parametrize(
    "offset",
    [FeedOffset(bytes(16), 0), FeedOffset(b"\x01" * 16, 9, 4, b"\x02" * 16)],
)
def test_offsets_come_back_as_they_were(offset: FeedOffset) -> None:
    """A stored offset is parsed to an equal one."""
    assert FeedOffset.of(offset.as_dict()) == offset


@pytest.mark.parametrize("value", [{}, {"walId": 1}, {"databaseId": "x", "walId": 1}])
def test_other_offsets_are_refused(value: dict[str, object]) -> None:
    """Offsets of another source are refused."""
    with pytest.raises(InvalidRequest, match="offset"):
        FeedOffset.of(value)


PUT, TOMBSTONE, RANGE = Kind.PUT, Kind.TOMBSTONE, Kind.RANGE_TOMBSTONE


def test_spark_expects_what_tasks_make() -> None:
    """The schema of the source is that of the batches."""
    assert to_arrow_schema(SCHEMA, timezone="UTC") == ARROW_SCHEMA


async def mixed() -> FeedDatabase:
    """Make an object with three commits whose keys interleave."""
    database = await FeedDatabase.created()
    await database.object()  # a fence
    points = [
        Entry(b"a", 3, TOMBSTONE),
        Entry(b"a", 1, PUT, b"first"),
        Entry(b"b", 2, PUT, b"brief", 1_000),
        Entry(b"c", 2, PUT, b""),
        Entry(b"d", 3, TOMBSTONE, b"", 2_000),
    ]
    await database.object(points, [Entry(b"a", 2, RANGE, b"c"), Entry(b"b", 1, RANGE, b"")])
    return database


async def test_rows_come_in_the_order_of_commits() -> None:
    """Rows are in the order of commits; in one commit deletes of ranges come first, then
    keys in order. A fence has no rows.
    """
    database = await mixed()
    rows = await database.rows(database.query(), *_whole(database))
    assert [(row["seq"], row["op"], row["key"], row["value"]) for row in rows] == [
        (1, "delete_range", b"b", None),
        (1, "put", b"a", b"first"),
        (2, "delete_range", b"a", b"c"),
        (2, "put", b"b", b"brief"),
        (2, "put", b"c", b""),
        (3, "delete", b"a", None),
        (3, "expire", b"d", None),
    ]
    assert {(row["wal_id"], row["epoch"]) for row in rows} == {(1, EPOCH)}
    assert [row["expire_at"] for row in rows if row["key"] == b"d"] == [
        datetime.fromtimestamp(2, UTC)
    ]
    assert [row["expire_at"] for row in rows if row["key"] == b"c"] == [None]


async def test_other_keys_are_left_out_and_ranges_cut() -> None:
    """With a range of keys, other keys are omitted, and deletes of ranges are cut."""
    database = await mixed()
    rows = await database.rows(database.query(start="b", end="c"), *_whole(database))
    assert [(row["seq"], row["op"], row["key"], row["value"]) for row in rows] == [
        (1, "delete_range", b"b", b"c"),
        (2, "delete_range", b"b", b"c"),
        (2, "put", b"b", b"brief"),
    ]


async def test_loads_are_fed_by_parts_of_their_files() -> None:
    """A load is read in parts of its files, with its sequence number, between the commits
    around it, without other keys.
    """
    database = await FeedDatabase.created()
    await database.put(b"before")
    await database.load([b"a", b"b"], [b"c"], [b"d"])
    await database.put(b"behind")
    query = database.query(partitionBytes=1, start="b", end="d")
    parts = await query.parts(*_whole(database))
    assert [type(part) for part in parts] == [SlotsPart, LoadPart, LoadPart, SlotsPart]
    rows = await database.rows(query, *_whole(database))
    assert [(row["wal_id"], row["seq"], row["key"]) for row in rows] == [
        (0, 1, b"before"),
        (1, 2, b"b"),
        (1, 2, b"c"),
        (2, 3, b"behind"),
    ]
    assert {row["epoch"] for row in rows} == {EPOCH}


async def test_a_load_that_the_driver_overlooks_is_fed_all_the_same() -> None:
    """A task reads the files of a load record in its WAL object if the driver has made no
    part of it.
    """
    database = await FeedDatabase.created()
    await database.load([b"a"], [b"b"])
    part = SlotsPart(database.database_id, 0, (1_000,))
    batches = [each async for each in read_part(database.cas(), part, ALL_KEYS)]
    assert [row["key"] for batch in batches for row in batch.to_pylist()] == [b"a", b"b"]


async def test_an_object_may_commit_several_loads() -> None:
    """All loads of an object with several are read."""
    database = await FeedDatabase.created()
    loads = [await database.load([key]) for key in (b"a", b"b")]
    await database.object(control=[load_entry(load, 3 + at) for at, load in enumerate(loads)])
    rows = await database.rows(database.query(), *_whole(database))
    assert [(row["wal_id"], row["seq"], row["key"]) for row in rows] == [
        (0, 1, b"a"),
        (1, 2, b"b"),
        (2, 3, b"a"),
        (2, 4, b"b"),
    ]


async def test_slots_out_of_order_end_the_query() -> None:
    """Objects whose sequence numbers are out of order end the query."""
    database = await FeedDatabase.created()
    await database.put(b"a")
    database.last_seq = 0
    await database.put(b"b")
    with pytest.raises(IllegalState, match="slot order"):
        await database.rows(database.query(), *_whole(database))


async def test_what_is_gone_when_a_task_reads_is_named() -> None:
    """A WAL object or a file of a load that is gone when a task reads is named by the error."""
    database = await FeedDatabase.created()
    await database.put(b"a")
    await database.load([b"b"])
    slots, load = await database.query().parts(*_whole(database))
    await database.store.delete([name for name in database.names() if "manifest" not in name])
    with pytest.raises(FeedWalCollected, match=r"wal/0+\.sst"):
        assert not [each async for each in read_part(database.cas(), slots, ALL_KEYS)]
    with pytest.raises(FeedWalCollected, match="file of load 'load 1' that WAL object 1"):
        assert not [each async for each in read_part(database.cas(), load, ALL_KEYS)]


def test_batches_are_bounded() -> None:
    """Batches are bounded by rows and bytes for objects of any size, and no row is lost."""
    batches = BatchBuilder()
    small = columns_of([Entry(b"%05d" % each, 1, PUT, b"") for each in range(20_000)])
    found = [*batches.add(0, 1, small), *batches.rest()]
    assert [each.num_rows for each in found] == [8_192, 8_192, 3_616]
    large = columns_of([Entry(b"%d" % each, 1, PUT, bytes(1 << 20)) for each in range(9)])
    found = [*batches.add(0, 1, large), *batches.rest()]
    assert sum(each.num_rows for each in found) == 9
    assert max(each.nbytes for each in found) <= feed_rows.BATCH_BYTES + 1_000
    huge = columns_of([Entry(b"h", 1, PUT, bytes(feed_rows.BATCH_BYTES + 1))])
    assert [each.num_rows for each in batches.add(0, 1, huge)] == [1]


def _whole(database: FeedDatabase) -> tuple[FeedOffset, FeedOffset]:
    database_id = database.database_id
    return FeedOffset(database_id, 0), FeedOffset(database_id, database.last_wal_id + 1, 0)
