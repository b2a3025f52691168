"""Every commit to the range is told, whole and exactly once, in order, however a watch begins."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from shalekv.core.key_range import KeyRange, prefix_end
from shalekv.v1 import kv_pb2
from tests.kit.seeds import random_of
from tests.kit.serving.letting_go import follow
from tests.kit.serving.messages import delete, delete_range, put
from tests.kit.serving.sweeping import compact
from tests.kit.serving.watchers import WatchClient, Watched, watched
from tests.unit.roles.watching.truth import ValuesBefore, told, truth, values_before

SEEDS = range(3)
WRITES = 80
KEYS = 30
SMALL: dict[str, Any] = {"watch_stream_bytes_max": 65_536, "watch_bytes_max": 262_144}
RANGES = [b"", b"k", b"k1", b"k2", b"k15"]


def some_write(random: Random) -> kv_pb2.WriteRequest:
    """Some changes of some keys, at times a range delete among them."""
    changes = []
    for _ in range(random.choice([1, 1, 2, 8])):
        key = b"k%d" % random.randrange(KEYS)
        kind = random.random()
        if kind < 0.75:
            changes.append(put(key, random.randbytes(random.choice([1, 10, 3_000]))))
        elif kind < 0.9:
            changes.append(delete(key))
        else:
            start, end = random.choice([key, b"a"]), random.choice([key + b"5", b"z"])
            changes.append(delete_range(start=start, end=end))
    return kv_pb2.WriteRequest(changes=changes)


async def write(watched: Watched, random: Random, count: int) -> int:
    """Many writes at once, so that objects hold several commits; the last commit."""
    replies = await asyncio.gather(*(watched.writer.ask(some_write(random)) for _ in range(count)))
    seqs: list[int] = [reply.header.seq for reply in replies]
    return max(seqs)


def whole(prefix: bytes) -> KeyRange:
    return KeyRange(prefix, prefix_end(prefix))


class Found:
    """What one watch was told."""

    def __init__(self) -> None:
        self.opened_at_seq = 0
        self.commits: list[kv_pb2.WatchCommit] = []


async def everything(client: WatchClient, last_seq: int) -> list[Found]:
    """What each watch of a client is told until all of them have seen `last_seq`."""
    found = [Found() for _ in RANGES]
    waiting = {*range(len(RANGES))}
    while waiting:
        reply = await client.take()
        kind = reply.WhichOneof("event")
        each = found[reply.watch_id]
        assert kind != "closed", reply
        if kind == "opened_at_seq":
            assert not each.opened_at_seq
            each.opened_at_seq = reply.opened_at_seq
            continue
        assert each.opened_at_seq
        if kind == "commit":
            each.commits.append(reply.commit)
        seen_seq = reply.commit.seq if kind == "commit" else reply.progress_seq
        if seen_seq >= last_seq and not reply.commit.more:
            waiting.discard(reply.watch_id)
    return found


def check_previous(commit: kv_pb2.WatchCommit, expected: ValuesBefore, *, is_known: bool) -> None:
    for change in commit.changes:
        if change.kind == kv_pb2.WatchChange.KIND_DELETE_RANGE or change.previous_unknown:
            assert not change.HasField("previous")
            assert not change.previous_unknown or not is_known
        else:
            value = change.previous.value if change.HasField("previous") else None
            assert value == expected[commit.seq, change.entry.key]


@pytest.mark.parametrize("seed", SEEDS)
async def test_watches_tell_the_log(seed: int) -> None:
    """Watches from the past and from now on, of many ranges, on streams that are taken fast or
    late, while writes go on with several objects in flight: each tells exactly the log, with the
    values before, which are unknown only where it began before what the levels hold.
    """
    random = random_of(f"told_once/{seed}")
    watching = SMALL | {"watch_progress_ms": 10}
    async with watched(
        max_parallel_writes=random.choice([1, 4]), watching=watching, memtable_segment_bytes=65_536
    ) as under:
        await write(under, random, WRITES)
        await compact(under.database)
        await follow(under.writer)
        leveled_seq = under.writer.engine.levels.current.tree.last_seq
        clients = [under.client() for _ in range(4)]
        starts = [random.choice([0, 1, random.randrange(1, WRITES), WRITES + 50]) for _ in clients]
        for client, start in zip(clients, starts, strict=True):
            for number, prefix in enumerate(RANGES):
                client.create(number, prefix, start_seq=start, previous_value=True)
        last_seq = max([await write(under, random, WRITES) for _ in range(3)])
        reading = [asyncio.create_task(everything(each, last_seq)) for each in clients]
        await write(under, random, WRITES)
        found_before = await values_before(under.database)
        for client, task, start in zip(clients, reading, starts, strict=True):
            client.end()
            for prefix, found in zip(RANGES, await task, strict=True):
                assert found.opened_at_seq == start or (not start and found.opened_at_seq > WRITES)
                expected = await truth(under.database, whole(prefix), found.opened_at_seq, last_seq)
                assert told(found.commits, last_seq) == expected, (start, prefix)
                is_known = found.opened_at_seq > leveled_seq
                for commit in found.commits:
                    check_previous(commit, found_before, is_known=is_known)
        status = under.watches.status()
        assert status.cut == 0
