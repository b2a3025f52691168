"""Batches that were stored as loads are commits like any other, reported in parts."""

from __future__ import annotations

from typing import Any

import pytest

from shalekv.format import names
from shalekv.v1 import kv_pb2
from tests.kit.engine.databases import Database
from tests.kit.serving.roles import delete, put
from tests.kit.serving.sweeping import compact
from tests.kit.serving.watchers import Watched, watched
from tests.unit.watch.truth import Change, reported

LARGE: dict[str, Any] = {"direct_ingest_bytes": 65_536}
KEYS = 3_000  # more than one window of entries that are read at once
SMALL: dict[str, Any] = {"watch_bytes_max": 262_144}
PUT = kv_pb2.WatchChange.KIND_PUT


def key(number: int) -> bytes:
    return b"load/%05d" % number


async def load(cluster: Watched, value: bytes) -> int:
    """Write a batch that becomes a load; return its sequence number."""
    batch = [put(key(number), value + b"%d" % number + bytes(40)) for number in range(KEYS)]
    reply = await cluster.writer.ask(kv_pb2.WriteRequest(changes=[*batch, delete(b"gone")]))
    seq: int = reply.header.seq
    assert cluster.writer.engine.levels.load_count
    return seq


def changes_of(seq: int, value: bytes, start: int = 0, end: int = KEYS) -> list[Change]:
    return [
        Change(PUT, key(number), value + b"%d" % number + bytes(40), seq, b"")
        for number in range(start, end)
    ]


@pytest.mark.parametrize("is_past", [False, True])
async def test_load_is_reported_whole(is_past: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """A load is one commit, in order among the others, whether it is new or past; a watch of a few
    of its keys reports those, and a watch of none reports nothing.
    """
    async with watched(**LARGE, watching=SMALL) as cluster:
        client = cluster.client()
        ranges = [b"", b"load/0010", b"other"]
        if not is_past:
            for number, prefix in enumerate(ranges):
                client.create(number, prefix)
                await client.opened(number)
        first = (await cluster.writer.put(b"load/00101", b"before")).header.seq
        seq = await load(cluster, b"v")
        last_seq = (await cluster.writer.put(b"load/00102", b"after")).header.seq
        if is_past:
            for number, prefix in enumerate(ranges):
                client.create(number, prefix, start_seq=first)
        found: dict[int, list[kv_pb2.WatchCommit]] = {0: [], 1: [], 2: []}
        parts = 0
        while not (found[0] and found[1] and found[0][-1].seq == found[1][-1].seq == last_seq):
            reply = await client.take()
            if reply.WhichOneof("event") == "commit":
                commits = found[reply.watch_id]
                if commits and commits[-1].more:
                    commits[-1].changes.extend(reply.commit.changes)
                    commits[-1].more = reply.commit.more
                    parts += 1
                else:
                    commits.append(reply.commit)
        assert parts > 1
        before = Change(PUT, b"load/00101", b"before", first, b"")
        after = Change(PUT, b"load/00102", b"after", last_seq, b"")
        gone = Change(kv_pb2.WatchChange.KIND_DELETE, b"gone", b"", seq, b"")
        assert reported(found[0]) == [
            (first, [before]),
            (seq, [gone, *changes_of(seq, b"v")]),
            (last_seq, [after]),
        ]
        assert reported(found[1]) == [
            (first, [before]),
            (seq, changes_of(seq, b"v", 100, 110)),
            (last_seq, [after]),
        ]
        assert not found[2]


@pytest.mark.parametrize("is_past", [False, True])
async def test_values_before_a_load(is_past: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """Values before are reported for a load, and for writes that replace a part of it; two watches
    of one stream report the same for a key that is in both ranges.
    """
    async with watched(**LARGE, watching=SMALL) as cluster:
        client = cluster.client()
        prefixes = [b"load/000", b"load/0001"]
        if not is_past:
            for number, prefix in enumerate(prefixes):
                client.create(number, prefix, previous_value=True)
                await client.opened(number)
        first = (await cluster.writer.put(key(11), b"before")).header.seq
        await load(cluster, b"v")
        await load(cluster, b"w")
        last_seq = (await cluster.writer.put(key(11), b"after")).header.seq
        if is_past:
            for number, prefix in enumerate(prefixes):
                client.create(number, prefix, previous_value=True, start_seq=first)
        values: dict[int, list[bytes]] = {0: [], 1: []}
        seen = dict.fromkeys(values, 0)
        while min(seen.values()) < last_seq:
            reply = await client.take()
            for change in reply.commit.changes:
                assert not change.previous_unknown
                if change.entry.key == key(11):
                    values[reply.watch_id].append(change.previous.value)
                elif change.entry.value.startswith(b"v"):
                    assert not change.HasField("previous")
            seen[reply.watch_id] = max(seen[reply.watch_id], reply.commit.seq)
        expected = [b"", b"before", b"v11", b"w11"]
        for found in values.values():
            assert [value.rstrip(b"\0") for value in found] == expected


async def test_load_whose_ssts_are_gone() -> None:
    """A load that was merged, and whose SSTs were collected, cannot be reported: the watch is
    closed with the first commit after it.
    """
    database = await Database.created()
    async with watched(database, **LARGE, fence_poll_ms=10) as cluster:
        first = (await cluster.writer.put(b"a")).header.seq
        seq = await load(cluster, b"v")
        last_seq = (await cluster.writer.put(b"b")).header.seq
    await compact(database, l0_trigger_count=4)
    files = [info.id for info in (await database.manifest()).leveled_ssts]
    async with watched(database, **LARGE) as cluster:
        await database.remove(*map(names.level_name, files))
        client = cluster.client()
        client.create(start_seq=first)
        await client.opened()
        assert (await client.commit()).seq == first
        closed = await client.closed()
        assert closed.reason == "WAL_COLLECTED"
        assert closed.metadata["oldest_seq"] == str(seq + 1)
        client.create(2, start_seq=seq + 1)
        await client.opened(2)
        assert [commit.seq for commit in await client.until(last_seq, 2)] == [last_seq]
