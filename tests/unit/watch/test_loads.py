"""Batches that were stored as loads are commits like any other, told in parts."""

from __future__ import annotations

from typing import Any

import pytest

from shalekv.format import names
from shalekv.v1 import kv_pb2
from tests.kit.engine.databases import Database
from tests.kit.serving.roles import delete, put
from tests.kit.serving.sweeping import compact
from tests.kit.serving.watchers import Watched, watched
from tests.unit.watch.truth import Change, told

LARGE: dict[str, Any] = {"skip_memtable_bytes": 65_536}
KEYS = 3_000  # more than one window of what is read at once
SMALL: dict[str, Any] = {"watch_stream_bytes_max": 65_536, "watch_bytes_max": 262_144}
PUT = kv_pb2.WatchChange.KIND_PUT


def key(number: int) -> bytes:
    return b"load/%05d" % number


async def load(under: Watched, value: bytes) -> int:
    """Write a batch that becomes a load; its sequence number."""
    batch = [put(key(number), value + b"%d" % number + bytes(40)) for number in range(KEYS)]
    reply = await under.writer.ask(kv_pb2.WriteRequest(changes=[*batch, delete(b"gone")]))
    seq: int = reply.header.seq
    assert under.writer.engine.levels.load_count
    return seq


def changes_of(seq: int, value: bytes, start: int = 0, end: int = KEYS) -> list[Change]:
    return [
        Change(PUT, key(number), value + b"%d" % number + bytes(40), seq, b"")
        for number in range(start, end)
    ]


@pytest.mark.parametrize("is_past", [False, True])
async def test_load_is_told_whole(is_past: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """A load is one commit, in its place between others, whether it comes or is past; a watch
    of a few of its keys is told those, and a watch of none nothing.
    """
    async with watched(**LARGE, watching=SMALL) as under:
        client = under.client()
        ranges = [b"", b"load/0010", b"other"]
        if not is_past:
            for number, prefix in enumerate(ranges):
                client.create(number, prefix)
                await client.opened(number)
        first = (await under.writer.put(b"load/00101", b"before")).header.seq
        seq = await load(under, b"v")
        last_seq = (await under.writer.put(b"load/00102", b"after")).header.seq
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
        assert told(found[0]) == [
            (first, [before]),
            (seq, [gone, *changes_of(seq, b"v")]),
            (last_seq, [after]),
        ]
        assert told(found[1]) == [
            (first, [before]),
            (seq, changes_of(seq, b"v", 100, 110)),
            (last_seq, [after]),
        ]
        assert not found[2]


@pytest.mark.parametrize("is_past", [False, True])
async def test_values_before_a_load(is_past: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """What a load replaces is told, and what replaces a part of a load: what is in two ranges
    of one stream is told the same in both.
    """
    async with watched(**LARGE, watching=SMALL) as under:
        client = under.client()
        prefixes = [b"load/000", b"load/0001"]
        if not is_past:
            for number, prefix in enumerate(prefixes):
                client.create(number, prefix, previous_value=True)
                await client.opened(number)
        first = (await under.writer.put(key(11), b"before")).header.seq
        await load(under, b"v")
        await load(under, b"w")
        last_seq = (await under.writer.put(key(11), b"after")).header.seq
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


async def test_load_whose_files_are_gone() -> None:
    """A load that was merged away, and whose files were collected, cannot be told: the watch is
    closed with the first commit behind it.
    """
    database = await Database.created()
    async with watched(database, **LARGE, fence_poll_ms=10) as under:
        first = (await under.writer.put(b"a")).header.seq
        seq = await load(under, b"v")
        last_seq = (await under.writer.put(b"b")).header.seq
    await compact(database, l0_trigger_count=4)
    files = [info.id for info in (await database.manifest()).leveled_ssts]
    async with watched(database, **LARGE) as under:
        await database.remove(*map(names.level_name, files))
        client = under.client()
        client.create(start_seq=first)
        await client.opened()
        assert (await client.commit()).seq == first
        closed = await client.closed()
        assert closed.reason == "WAL_COLLECTED"
        assert closed.metadata["oldest_seq"] == str(seq + 1)
        client.create(2, start_seq=seq + 1)
        await client.opened(2)
        assert [commit.seq for commit in await client.until(last_seq, 2)] == [last_seq]
