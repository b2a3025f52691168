"""The values before: those of the log, wherever they stand, and unknown only where they must be."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from shalekv.core.entry import Entry, Kind
from shalekv.v1 import kv_pb2
from tests.kit.engine.databases import Database
from tests.kit.seeds import random_of
from tests.kit.serving.letting_go import follow
from tests.kit.serving.messages import delete, delete_range, put
from tests.kit.serving.sweeping import compact
from tests.kit.serving.watchers import WatchClient, Watched, watched
from tests.unit.roles.watching.truth import wal_entries

SEEDS = range(4)
WRITES = 60
KEYS = 12
SMALL: dict[str, Any] = {"watch_stream_bytes_max": 65_536, "watch_bytes_max": 262_144}
UNKNOWN = object()


def some_write(random: Random) -> kv_pb2.WriteRequest:
    changes = []
    for _ in range(random.choice([1, 1, 3])):
        key = b"k%02d" % random.randrange(KEYS)
        kind = random.random()
        if kind < 0.7:
            changes.append(put(key, random.randbytes(random.choice([2, 2, 900]))))
        elif kind < 0.85:
            changes.append(delete(key))
        else:
            changes.append(delete_range(start=key, end=b"k%02d" % random.randrange(KEYS) + b"~"))
    return kv_pb2.WriteRequest(
        changes=[
            each
            for each in changes
            if not each.HasField("delete_range")
            or each.delete_range.range.start < each.delete_range.range.end
        ]
        or [put(b"k00")]
    )


async def write(under: Watched, random: Random) -> int:
    writes = [under.writer.ask(some_write(random)) for _ in range(WRITES)]
    seqs: list[int] = [reply.header.seq for reply in await asyncio.gather(*writes)]
    return max(seqs)


async def values_before(database: Database) -> dict[tuple[int, bytes], bytes | None]:
    """The value before each change of a key, by the log alone."""
    state: dict[bytes, bytes] = {}
    found: dict[tuple[int, bytes], bytes | None] = {}
    commits: dict[int, list[Entry]] = {}
    for entry in await wal_entries(database):
        commits.setdefault(entry.seq, []).append(entry)
    for seq, entries in commits.items():
        before = dict(state)
        for entry in entries:  # range deletes come first
            if entry.kind is Kind.RANGE_TOMBSTONE:
                for key in [
                    k for k in state if k >= entry.key and (not entry.value or k < entry.value)
                ]:
                    del state[key]
                continue
            found[seq, entry.key] = before.get(entry.key)
            if entry.kind is Kind.PUT:
                state[entry.key] = entry.value
            else:
                state.pop(entry.key, None)
    return found


async def told_until(
    client: WatchClient, seq: int, watch_id: int = 1
) -> dict[tuple[int, bytes], Any]:
    found: dict[tuple[int, bytes], Any] = {}
    for commit in await client.until(seq, watch_id):
        for change in commit.changes:
            if change.kind == kv_pb2.WatchChange.KIND_DELETE_RANGE:
                assert not change.HasField("previous")
                assert not change.previous_unknown
            elif change.previous_unknown:
                found[commit.seq, change.entry.key] = UNKNOWN
            else:
                has_one = change.HasField("previous")
                found[commit.seq, change.entry.key] = change.previous.value if has_one else None
    return found


def is_right(found: dict[tuple[int, bytes], Any], truth: dict[tuple[int, bytes], Any]) -> bool:
    return all(value is UNKNOWN or value == truth[place] for place, value in found.items())


@pytest.mark.parametrize("seed", SEEDS)
async def test_values_before_are_those_of_the_log(seed: int) -> None:
    """A watch of the feed knows every value before, in memory and in the levels, also of commits
    that share an object; one that is slow, or begins behind the levels, knows all as well.
    """
    random = random_of(f"previous/{seed}")
    async with watched(
        max_parallel_writes=random.choice([1, 3]),
        watching=SMALL,
        fence_poll_ms=3_600_000,
        memtable_segment_bytes=65_536,
    ) as under:
        client = under.client()
        client.create(previous_value=True)
        await client.opened()
        await write(under, random)
        await compact(under.database)
        await follow(under.writer)
        last_seq = await write(under, random)
        found = await told_until(client, last_seq)
        truth = await values_before(under.database)
        assert found == truth
        c_seq = under.writer.engine.levels.current.tree.last_seq
        slow_seq = await write(under, random)
        last_seq = await write(under, random)
        truth = await values_before(under.database)
        assert slow_seq < last_seq
        start = random.randint(c_seq + 1, last_seq)
        late = under.client()
        late.create(previous_value=True, start_seq=start)
        for each, first in ((client, slow_seq), (late, start)):
            found = await told_until(each, last_seq)
            assert UNKNOWN not in found.values()
            assert is_right(found, truth)
            assert {place for place in truth if place[0] >= first} <= found.keys()


async def test_values_that_do_not_fit_are_unknown() -> None:
    """Two values that do not fit into one message are not sent together: the new one is."""
    size = 2_500_000
    async with watched() as under:
        client = under.client()
        client.create(previous_value=True)
        await client.opened()
        for value in (b"a" * size, b"b" * size):
            await under.writer.put(b"k", value)
        await client.commit()
        change = (await client.commit()).changes[0]
        assert change.entry.value == b"b" * size
        assert change.previous_unknown
