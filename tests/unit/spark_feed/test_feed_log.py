"""The end of what a stream reads, and the states of a log in which it must fail."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxFiles

from shalekv.errors import DatabaseMismatch, IllegalState, InvalidSetting
from shalekv.format import names
from shalekv.protocol.manifest import Manifest
from shalekv_spark.feed import query as feed_query
from shalekv_spark.feed.query import FeedLog, FeedQuery
from shalekv_spark.feed.slots import FeedOffset, FeedWalCollected
from tests.kit.engine.feed_database import EPOCH, FeedDatabase

ALL = ReadAllAvailable()


async def remove(database: FeedDatabase, *wal_ids: int) -> None:
    await database.store.delete([names.wal_name(wal_id) for wal_id in wal_ids])


async def batches(
    query: FeedQuery, limit: ReadLimit, start: FeedOffset | None = None
) -> list[FeedOffset]:
    """Return the ends of all batches, until nothing is left."""
    ends = [await query.initial() if start is None else start]
    while (end := await query.latest(ends[-1], limit)) != ends[-1]:
        ends.append(end)
    return ends


async def test_commits_behind_a_gap_are_not_fed() -> None:
    """Objects behind a gap are not read until the gap is filled."""
    database = await FeedDatabase.created()
    await database.put(b"a")
    database.last_wal_id += 1
    await database.put(b"c")
    query = database.query(startingOffset="earliest", pollIntervalMs=0)
    ends = await batches(query, ALL)
    assert [each.wal_id for each in ends] == [0, 1]
    database.last_wal_id = 0
    await database.put(b"b")
    assert [each.wal_id for each in await batches(query, ALL, ends[-1])] == [1, 3]


@pytest.mark.parametrize("missing", [0, 1, 2])
async def test_a_hole_in_what_was_compacted_is_an_error(missing: int) -> None:
    """A missing object among compacted ones is an error that names it, and nothing behind
    it is read.
    """
    database = await FeedDatabase.created()
    await database.put(b"a")
    query = database.query(startingOffset=0, pollIntervalMs=0)
    start = await query.initial()
    for key in (b"b", b"c", b"d"):
        await database.put(key)
    await database.compact(2)
    await remove(database, missing)
    with pytest.raises(FeedWalCollected, match=f"{names.wal_name(missing)}.* begin with is"):
        await query.latest(start, ALL)
    with pytest.raises(FeedWalCollected, match=names.wal_name(missing)):
        await database.query().parts(start, FeedOffset(database.database_id, 4, 0))


async def test_what_is_compacted_between_list_and_manifest_is_no_hole() -> None:
    """An object that was compacted between list and manifest is found by another list."""
    database = await FeedDatabase.created()
    await database.put(b"a")

    class Late(FeedLog):
        """A log in which others act between its list and its read of the manifest."""

        async def manifest(self) -> Manifest:
            if database.last_wal_id == 0:
                await database.put(b"b")
                await database.compact(1)
            return await super().manifest()

    assert await Late(database.cas()).filled(0, 100) == range(2)


async def test_a_stream_goes_on_behind_ids_that_were_left_out() -> None:
    """A stream continues behind ids that a switch to safekeepers leaves out, although a
    late opener puts a fence among them.
    """
    database = await FeedDatabase.created()
    await database.put(b"a")
    query = database.query(startingOffset=0, pollIntervalMs=0)
    ends = await batches(query, ALL)
    await database.put(b"b")
    await database.edit(
        lambda m: replace(m, wal_ids_left_out=(range(2, 10),), wal_id_last_compacted=9)
    )
    await database.object()
    late = replace(ends[-1], wal_id=3, batch_wal_id=2)  # a batch that was planned before the switch
    assert await database.rows(query, replace(late, wal_id=2), late) == []
    database.last_wal_id = 9
    await database.put(b"c")
    ends += (await batches(query, ALL, ends[-1]))[1:]
    assert [each.wal_id for each in ends] == [0, 1, 3, 11]
    reported = [await database.rows(query, *pair) for pair in pairwise(ends)]
    assert [row["key"] for rows in reported for row in rows] == [b"a", b"b", b"c"]


@pytest.mark.parametrize("looked_into", [1, 256])
async def test_batches_are_limited_by_objects_and_bytes(
    monkeypatch: pytest.MonkeyPatch, looked_into: int
) -> None:
    """A batch is limited by objects and bytes, has at least one object, and counts files of
    loads. The number of slots that are described at once does not matter.
    """
    monkeypatch.setattr(feed_query, "SLOTS_AT_ONCE", looked_into)
    database = await FeedDatabase.created()
    await database.put(b"a")
    await database.load([b"%03d" % each for each in range(200)])
    for key in (b"b", b"c", b"d", b"e"):
        await database.put(key)
    query = database.query(startingOffset=0)
    assert [each.wal_id for each in await batches(query, ReadMaxFiles(4))] == [0, 4, 6]
    put_bytes = (await database.store.head(names.wal_name(2))).size_bytes
    query = database.query(startingOffset=0, maxBytesPerTrigger=3 * put_bytes)
    assert [each.wal_id for each in await batches(query, ReadMaxFiles(4))] == [0, 1, 2, 5, 6]
    query = database.query(startingOffset=0, maxBytesPerTrigger=1)
    assert len(await batches(query, ReadMaxFiles(4))) == 7
    assert [each.wal_id for each in await batches(query, ALL)] == [0, 6]


async def test_a_query_that_is_to_end_reads_what_was_there() -> None:
    """A query with `availableNow` reads what is in the log at its beginning, and the next
    one continues there.
    """
    database = await FeedDatabase.created()
    for key in (b"a", b"b", b"c"):
        await database.put(key)
    query = database.query(startingOffset="earliest")
    await query.fix_target()
    await database.put(b"d")
    ends = await batches(query, ReadMaxFiles(2))
    assert [each.wal_id for each in ends] == [0, 2, 3]
    later = database.query()
    await later.fix_target()
    assert [each.wal_id for each in await batches(later, ReadMaxFiles(2), ends[-1])] == [3, 4]


async def test_a_first_batch_is_repeated_from_where_it_began() -> None:
    """A repeated first batch has the same objects, although the log has grown or was
    collected meanwhile.
    """
    database = await FeedDatabase.created()
    await database.put(b"a")
    query = database.query()  # from the latest on
    start = await query.initial()
    await database.put(b"b")
    end = await query.latest(start, ALL)
    await database.put(b"c")
    again = database.query()
    moved = await again.initial()
    assert moved != start
    assert [row["key"] for row in await database.rows(again, moved, end)] == [b"b"]
    assert not await again.parts(end, end)
    assert not await again.parts(moved, start)


async def test_new_queries_begin_at_their_start_option() -> None:
    """A new query begins at the end, at the first object without a hole behind it, or at an
    id below the end.
    """
    database = await FeedDatabase.created()
    for key in (b"a", b"b", b"c", b"d"):
        await database.put(key)
    await database.compact(2)
    await remove(database, 1)
    assert (await database.query().initial()).wal_id == 4
    assert (await database.query(startingOffset="earliest").initial()).wal_id == 2
    assert (await database.query(startingOffset=4).initial()).wal_id == 4
    with pytest.raises(InvalidSetting, match="startingOffset: 5 is behind the end"):
        await database.query(startingOffset=5).initial()


async def test_another_database_is_noticed() -> None:
    """An offset of another database is refused by its id."""
    database, other = await FeedDatabase.created(), await FeedDatabase.created(seed=1)
    await database.put(b"a")
    await other.put(b"a")
    [_, end] = await batches(database.query(startingOffset=0), ALL)
    with pytest.raises(DatabaseMismatch, match=other.database_id.hex()):
        await other.query().latest(end, ALL)
    start = await other.query(startingOffset=0).initial()
    with pytest.raises(DatabaseMismatch, match=other.database_id.hex()):
        await other.query().parts(start, end)


@pytest.mark.parametrize("written_again", [0, 1, 3])
async def test_an_older_state_is_noticed(written_again: int) -> None:
    """An older state is noticed if its log ends too early, or by the object before the
    offset; a running query notices it by the epoch of another writer.
    """
    database = await FeedDatabase.created()
    for key in (b"a", b"b", b"c"):
        await database.put(key)
    running = database.query(startingOffset=0, pollIntervalMs=0)
    *_, end = await batches(running, ALL)
    await database.query().latest(end, ALL)
    await remove(database, 1, 2)
    database.last_wal_id = 0
    for each in range(written_again):
        await database.put(b"%d" % each)
    with pytest.raises(IllegalState, match="older state"):
        await database.query().latest(end, ALL)
    with pytest.raises(IllegalState, match="older state"):
        await database.query().parts(replace(end, wal_id=0), end)
    await database.edit(lambda manifest: replace(manifest, writer_epoch=2 * EPOCH))
    with pytest.raises(IllegalState, match="older state"):
        await running.latest(end, ALL)
    again = database.query()  # of a first batch, for which Spark asks where it began
    start = await again.initial()
    with pytest.raises(IllegalState, match="older state"):
        await again.parts(start, end)
