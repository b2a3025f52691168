"""The rows that a task reads, compared with a model, over all histories of keys."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shalekv.format.names import level_name
from shalekv.jobs.compact.outputs import OutputOwner
from shalekv.jobs.compact.pace import TokenBucket
from shalekv.jobs.compact.parts import MergePart, PartResult, run_part
from shalekv.protocol.compaction.jobs import OlderKeys
from shalekv.protocol.compaction.publish import CompactorId
from shalekv.protocol.entry import Entry, KeyRange, Kind
from shalekv.protocol.lease import RANDOM_BYTES, new_lease_id
from shalekv.settings import MIB, LevelSettings
from shalekv_spark.arrow import merging
from shalekv_spark.compaction.tasks import merge_part
from shalekv_spark.scanning.scan_task import ScanTask
from tests.kit.samples import DATABASE_ID
from tests.unit.spark_arrow.scanned import (
    NOW_MS,
    ScannedDatabase,
    expected,
    expected_versions,
    is_range,
    rows_of_task,
)

# Of one length; with what looks the same for more than eight bytes; ends of others; none at all.
KEYS = (
    [b"%04d" % number for number in range(40)],
    [b"a long prefix %s%d" % (b"x" * (number % 12), number % 7) for number in range(40)],
    [
        b"",
        b"\x00",
        b"\x00\x00",
        b"a",
        b"a\x00",
        b"a\x00\x00",
        b"a" * 30,
        b"b",
        b"\xff",
        b"\xff\xff",
    ],
)

WAYS = [0, 10**9]  # all parts of a window are merged key by key, or none


def commit(random: Random, keys: Sequence[bytes], seq: int) -> list[Entry]:
    """Draw the changes of one commit: at most one of each key, and ranges."""
    entries = []
    for key in random.sample(keys, random.randint(1, min(6, len(keys)))):
        if random.random() < 0.25:
            at_ms = random.choice((0, 0, NOW_MS - 5))
            entries.append(Entry(key, seq, Kind.TOMBSTONE, b"", at_ms))
        else:
            at_ms = random.choice((0, 0, 0, 1, NOW_MS - 1, NOW_MS, NOW_MS + 1, 2**50))
            value = random.randbytes(random.choice((0, 3, 40)))
            entries.append(Entry(key, seq, Kind.PUT, value, at_ms))
    if random.random() < 0.15:
        start, end = sorted(random.sample(keys, 2))
        entries.append(Entry(start, seq, Kind.RANGE_TOMBSTONE, random.choice((end, end, b""))))
    return entries


def made(random: Random, keys: Sequence[bytes], *, levels_only: bool = False) -> ScannedDatabase:
    """Put commits, in order, into objects, a few in each."""
    database, seq = ScannedDatabase(random), 0
    kinds = ["run", "run", "run", "load"] + ([] if levels_only else ["wal", "tail"])
    for _ in range(random.randint(1, 8)):
        kind = random.choice(kinds)
        entries: list[Entry] = []
        for _ in range(1 if kind == "load" else random.randint(1, 6)):
            seq += random.randint(1, 3)
            entries += commit(random, keys, seq)
        if kind == "load":
            database.add_load([entry for entry in entries if not is_range(entry)])
        elif kind == "wal":
            database.add_wal(entries)
        elif kind == "tail":
            database.add_tail(entries)
        else:
            database.add_run(entries, sorted(random.sample(keys, random.randint(0, 3))))
    random.shuffle(database.sources)  # only sequence numbers say which is newer
    return database


def bounds(random: Random, keys: Sequence[bytes]) -> KeyRange:
    start, end = sorted(random.sample(keys, 2))
    return KeyRange(random.choice((b"", b"", start)), random.choice((b"", b"", end)))


DRAWN = (
    st.integers(0, 2**32),
    st.sampled_from(KEYS),
    st.sampled_from([0, 3_000, 64 * MIB]),
    st.sampled_from(WAYS),
)


def drawn(seed: int, keys: Sequence[bytes], **fields: Any) -> tuple[ScannedDatabase, ScanTask]:
    """Draw a database, and a task that reads some keys of one of its states."""
    random = Random(seed)
    database = made(random, keys)
    newest = max(entry.seq for entry in database.stored)
    task = database.task(
        keys=bounds(random, keys),
        seq=random.choice((newest, random.randint(1, newest))),
        **{"now_ms": random.choice((0, NOW_MS, 2**51))} | fields,
    )
    return database, task


def rows_read(database: ScannedDatabase, task: ScanTask, few: int) -> list[tuple[Any, ...]]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(merging, "_FEW", few)
        return asyncio.run(rows_of_task(database.store, task))


@settings(max_examples=120, deadline=None)
@given(*DRAWN)
def test_a_task_reads_the_newest_versions(
    seed: int, keys: Sequence[bytes], memory_bytes: int, few: int
) -> None:
    """Each visible key is read once, as its newest version in the state, and no other key (I2)."""
    database, task = drawn(seed, keys, memory_bytes=memory_bytes)
    right = [(e.key, e.value, e.seq, e.expire_at_ms) for e in expected(task, database.stored)]
    latest_ms = 253_402_300_799_999
    found = rows_read(database, task, few)
    assert found == [(*row[:-1], min(row[-1], latest_ms)) for row in right]


@settings(max_examples=80, deadline=None)
@given(*DRAWN)
def test_all_versions(seed: int, keys: Sequence[bytes], memory_bytes: int, few: int) -> None:
    """With all versions, each stored version is read once, by key and from newest to
    oldest, with whether a read sees it.
    """
    columns = ("is_live", "key", "kind", "seq", "value_bytes")
    database, task = drawn(
        seed, keys, columns=columns, all_versions=True, memory_bytes=memory_bytes, now_ms=NOW_MS
    )
    assert rows_read(database, task, few) == [
        (is_live, entry.key, entry.kind, entry.seq, len(entry.value))
        for entry, is_live in expected_versions(task, database.stored)
    ]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(KEYS))
def test_a_task_reads_what_a_compaction_leaves(seed: int, keys: Sequence[bytes]) -> None:
    """The engine's own merge of the same sources, with nothing below them, has the same rows."""
    random = Random(seed)
    database = made(random, keys, levels_only=True)
    ordered = sorted(database.sources, key=lambda run: max(info.max_seq for info in run))
    part = MergePart(
        owner=OutputOwner(
            DATABASE_ID, CompactorId(1, bytes(16)), new_lease_id(1, bytes(RANDOM_BYTES)), 1
        ),
        target_level=1,
        sources=ordered[::-1],
        keys=KeyRange(b"", b""),
        older=OlderKeys(),
        expiry_horizon_ms=NOW_MS,
        cuts=(),
        levels=LevelSettings(),
        memory_bytes=MIB,
        bytes_per_s=0,
    )
    task = database.task(memory_bytes=3_000)

    def left_by(result: PartResult) -> list[Entry]:
        ssts = [database.levels.sst(level_name(info.id)) for info in result.outputs]
        return [entry for sst in ssts for entry in sst.entries()]

    async def all_three() -> tuple[list[Entry], list[Entry], list[tuple[object, ...]]]:
        store = database.store
        pace = TokenBucket(store.runtime.clock, 0)
        merged = left_by(await run_part(store, part, pace))
        by_arrow = left_by(await merge_part(store, part, pace))
        return merged, by_arrow, await rows_of_task(store, task)

    left, by_arrow, found = asyncio.run(all_three())
    assert [row[:3] for row in found] == [(e.key, e.value, e.seq) for e in left]
    assert by_arrow == left
