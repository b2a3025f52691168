"""The client's watches and snapshots with a real server."""

from __future__ import annotations

import asyncio

import pytest

from shalekv_client import (
    ChangeKind,
    Client,
    InvalidRequest,
    Put,
    SnapshotExists,
    SnapshotNotFound,
    SyncClient,
    Watch,
    WatchCommit,
)
from tests.kit.processes.in_process import memory_store, serving


async def next_commit(watch: Watch) -> WatchCommit:
    async for event in watch:
        if isinstance(event, WatchCommit):
            return event
    raise AssertionError("the watch has ended")


async def test_each_watch_gets_its_own_whole_commits() -> None:
    """One stream has watches of a prefix and of a range, with previous values."""
    async with serving(memory_store()) as served, Client(served.listen) as client:
        await client.put(b"a1", b"old")
        async with (
            client.watch(prefix=b"a", previous=True) as first,
            client.watch(start=b"b", end=b"c", from_seq=1) as second,
        ):
            changed = await client.delete_range(prefix=b"a")
            batch = await client.put(b"b1", b"new")
            (gone,) = (await next_commit(first)).changes
            assert (gone.kind, gone.key, gone.end) == (ChangeKind.DELETE_RANGE, b"a", b"b")
            reported = await next_commit(second)
            assert (reported.seq, reported.changes[0].value) == (batch.seq, b"new")
            status = await client.status()
            assert status.watches is not None
            assert (status.watches.watches, status.watches.streams) == (2, 1)
            await client.put(b"a2", b"x" * 10)
            (put,) = (await next_commit(first)).changes
            assert (put.kind, put.key, put.previous) == (ChangeKind.PUT, b"a2", None)
        assert changed.seq < batch.seq


async def test_ten_thousand_changes_are_one_event() -> None:
    """A commit that needs many messages is delivered whole."""
    async with (
        serving(memory_store()) as served,
        Client(served.listen) as client,
        client.watch() as watch,
    ):
        async with client.session() as session:
            done = session.write([Put(b"%05d" % n, bytes(1_000)) for n in range(10_000)])
        event = await next_commit(watch)
        assert event.seq == (await done).seq
    assert [change.key for change in event.changes] == [b"%05d" % n for n in range(10_000)]


async def test_programs_without_a_loop_watch_and_keep_snapshots() -> None:
    """The synchronous client does the same."""
    async with serving(memory_store()) as served:
        await asyncio.to_thread(_use_sync, served.listen)


def _use_sync(address: str) -> None:
    with SyncClient(address) as client:
        with client.watch(prefix=b"k") as watch:
            seqs = [client.put(b"k%d" % number, b"v").seq for number in range(3)]
            found = []
            for event in watch:
                if isinstance(event, WatchCommit):
                    found.append(event.seq)
                if len(found) == len(seqs):
                    break
            assert found == seqs
            assert watch.next_seq == seqs[-1] + 1
        created = client.create_snapshot("before", ttl_s=60)
        client.put(b"k0", b"after")
        then, now = client.get(b"k0", at=created), client.get(b"k0")
        assert then is not None
        assert now is not None
        assert (then.value, now.value) == (b"v", b"after")


async def test_wrong_watches_are_refused() -> None:
    """A range that ends before it begins, and a long name, are refused; other watches continue."""
    async with (
        serving(memory_store()) as served,
        Client(served.listen) as client,
        client.watch() as good,
    ):
        with pytest.raises(InvalidRequest):
            await client.watch(start=b"b", end=b"a").opened()
        with pytest.raises(InvalidRequest):
            await client.watch(consumer="x" * 200).opened()
        await client.put(b"k", b"v")
        assert (await next_commit(good)).changes[0].key == b"k"


async def test_snapshots_are_created_named_renewed_and_deleted() -> None:
    """By id or by name; reads at one see its state, however often it is overwritten."""
    async with serving(memory_store()) as served, Client(served.listen) as client:
        await client.put(b"k", b"one")
        named = await client.create_snapshot("nightly", ttl_s=600)
        await client.put(b"k", b"two")
        unnamed = await client.create_snapshot(forever=True)
        await client.put(b"k", b"three")
        assert [each.id for each in await client.list_snapshots() if each.seq] != []
        for snapshot, value in ((named, b"one"), (unnamed, b"two")):
            found = await client.get(b"k", at=snapshot.id)
            assert found is not None
            assert found.value == value
            assert [each.value async for each in client.scan(at=snapshot)] == [value]
        with pytest.raises(SnapshotExists):
            await client.create_snapshot("nightly", ttl_s=600)
        with pytest.raises(InvalidRequest):
            await client.create_snapshot("for no time")
        renewed = await client.renew_snapshot("nightly", ttl_s=6_000)
        assert renewed.id == named.id
        assert renewed.expire_time_s > named.expire_time_s
        assert (await client.renew_snapshot(unnamed.id, forever=True)).expire_time_s == 0
        await client.delete_snapshot("nightly")
        await client.delete_snapshot(unnamed.id)
        with pytest.raises(SnapshotNotFound):
            await client.delete_snapshot("nightly")
        with pytest.raises(SnapshotNotFound):
            await client.get(b"k", at=named.id)
