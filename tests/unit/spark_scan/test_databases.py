"""Tasks read databases of every kind: clones, databases without writes, and extreme keys."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shalekv.errors import OriginLost, SnapshotNotFound
from shalekv.protocol.entry import Entry, KeyRange, Kind
from shalekv.store.manifests import StoredManifest
from shalekv.write.snapshots import Snapshots
from shalekv_spark.arrow.reading import read_from
from shalekv_spark.place import Place
from shalekv_spark.scanning.planning import PartitionSize, ScanPlan, key_range, plan_from
from shalekv_spark.scanning.view import pin_existing, pin_new
from shalekv_spark.scanning.wal_tail import read_tail
from tests.kit.engine import places
from tests.kit.engine.feed_database import FeedDatabase
from tests.kit.engine.places import delete_range, everything, puts
from tests.kit.processes.in_process import real_runtime

ALL = KeyRange(b"", b"")
NOWHERE = Place("file:///nowhere")  # the place in tasks; the tests read from other stores


async def scanned(
    database: places.Place, keys: KeyRange = ALL, *, called: str = "", tail_bytes: int = 1 << 20
) -> list[places.Row]:
    """Return what tasks read of the snapshot with this name, or of a new one, in small parts."""
    with real_runtime(seed=database.seed()) as runtime:
        store = database.cas(runtime)
        pin = await (pin_existing(store, called) if called else pin_new(store, ttl_s=60))
        columns, wanted = ("key", "value", "seq"), PartitionSize(partition_bytes=1)
        reading = ScanPlan(NOWHERE, keys, columns, wanted, tail_memory_bytes=tail_bytes)
        rows: list[places.Row] = []
        for task in await plan_from(store, reading, pin):
            async for batch in read_from(store, task):
                rows += [(row["key"], row["value"], row["seq"]) for row in batch.to_pylist()]
        return rows


@pytest.mark.parametrize("tail_bytes", [0, 1 << 20])
async def test_a_clone_is_read_where_its_parent_has_it(tail_bytes: int) -> None:
    """A clone is read with the objects of its parent, also after the clone has written and
    merged.
    """
    parent, clone = await everything(), places.Place("clone")
    await parent.clone_to(clone)
    expected = await parent.rows()
    assert await scanned(clone, tail_bytes=tail_bytes) == expected
    await clone.snapshot("as it was")
    await clone.put(b"key003", b"new", value=b"of the clone")
    assert await scanned(clone, tail_bytes=tail_bytes) == await clone.rows()
    await clone.compact(l0_trigger_count=2)
    await parent.collect()
    await clone.collect(ahead_ms=0)
    assert await scanned(clone, tail_bytes=tail_bytes) == await clone.rows()
    assert await scanned(clone, called="as it was", tail_bytes=tail_bytes) == expected


async def test_a_clone_whose_parent_has_dropped_it_is_refused() -> None:
    """A clone that its parent has dropped is refused by name, before anything is pinned."""
    parent, clone = await everything(), places.Place("clone")
    await parent.clone_to(clone)
    before = await clone.manifest()
    (own,) = await parent.pins()
    with real_runtime(seed=1) as runtime:
        await Snapshots(parent.cas(runtime)).delete(own.id.hex(), is_forced=True)
    with pytest.raises(OriginLost, match=parent.url):
        await scanned(clone)
    assert await clone.manifest() == before


async def test_the_snapshot_that_keeps_a_clone_is_none_to_read() -> None:
    """The snapshot that keeps a clone is refused for reads, since it keeps no WAL."""
    parent, clone = await everything(), places.Place("clone")
    await parent.clone_to(clone)
    (own,) = await parent.pins()
    with pytest.raises(SnapshotNotFound, match="keeps no WAL"):
        await scanned(parent, called=own.name)


async def test_a_database_that_nobody_has_written_is_empty() -> None:
    """A database without writes is read as empty, opened by a writer or not."""
    database = places.Place("new")
    await database.open()
    assert await scanned(database) == []
    await database.put(b"k")
    await database.write(delete_range(b"a", b"z"))
    assert await scanned(database) == []
    await database.compact()
    assert await scanned(database) == []


async def test_versions_that_stand_in_few_objects_of_the_wal() -> None:
    """The newest version of the WAL is read, and all versions on request."""
    database = await FeedDatabase.created()
    await database.object([Entry(b"k", seq, Kind.PUT, b"v") for seq in (3, 2, 1)])
    await database.put(b"k")
    store = database.cas()
    manifest = replace(await StoredManifest(store).refresh(), wal_id_last_seen=1)
    for all_versions, expected in ((False, [4]), (True, [4, 3, 2, 1])):
        tail = await read_tail(store, manifest, memory_bytes=1 << 20, all_versions=all_versions)
        assert [*tail.rows.seqs] == expected


@pytest.mark.parametrize("is_compacted", [False, True])
@pytest.mark.parametrize("tail_bytes", [0, 1 << 20])
async def test_first_and_last_keys_of_all(*, is_compacted: bool, tail_bytes: int) -> None:
    """Keys of zeros and of 0xff are read at every border of parts."""
    longest = b"\xff" * 65_536
    keys = [b"\x00", b"\x00\x00", b"a\xff", b"a\xff\xff", b"b", b"\xff", b"\xff\xff", longest]
    database = places.Place("keys")
    await database.write(puts(keys[1:-1], b"old"))
    await database.write(delete_range(b"a\xff", b"\xff\xff"))
    for key in (b"\x00", b"a\xff\xff", b"\xff", longest):
        await database.put(key)
    if is_compacted:
        await database.compact()
    expected = [b"\x00", b"\x00\x00", b"a\xff\xff", b"\xff", b"\xff\xff", longest]

    async def found(**bounds: bytes) -> list[bytes]:
        keys = key_range(*(bounds.get(name, b"") for name in ("start", "end", "prefix")))
        return [row[0] for row in await scanned(database, keys, tail_bytes=tail_bytes)]

    assert await found() == expected
    assert await found(end=b"\x00\x00") == [b"\x00"]
    assert await found(start=b"\x00\x00") == expected[1:]
    assert await found(prefix=b"\x00") == expected[:2]
    assert await found(prefix=b"\xff") == expected[3:]
    assert await found(prefix=b"a\xff") == [b"a\xff\xff"]
    assert await found(prefix=b"\xff", end=b"\xff\xff") == [b"\xff"]
    assert await found(start=longest) == [longest]
    assert await found(start=longest + b"\xff") == []


async def test_a_snapshot_that_has_expired_is_refused() -> None:
    """A snapshot that has expired by the store's clock is refused, even if it is still in
    the manifest.
    """
    database = places.Place("expiring")
    await database.put(b"k")
    await database.snapshot("short")
    with real_runtime(seed=1) as runtime:
        later = database.cas(runtime, database.store_at(places.HOUR_MS + 1_000))
        with pytest.raises(SnapshotNotFound, match="short"):
            await pin_existing(later, "short")
        pin = await pin_existing(database.cas(runtime), "short")
        with pytest.raises(SnapshotNotFound, match="short"):
            await plan_from(later, ScanPlan(NOWHERE, ALL, ("key",)), pin)
