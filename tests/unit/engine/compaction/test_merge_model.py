"""Compactions picked at random, over everything that a key can go through."""

from __future__ import annotations

import asyncio
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from shalekv.core.compaction.jobs import Job, MergeJob, WalJob
from shalekv.core.compaction.state import move_result
from shalekv.core.entry import Kind
from shalekv.core.tree import L0, SYSTEM_LEVEL, Tree
from shalekv.format.system_key import record_key
from tests.kit.engine.compaction import (
    Trial,
    merge_job,
    random_entry,
    record,
    small_settings,
)
from tests.kit.engine.naive_merge import NaiveTree, Versions, answers

KEYS = [b"", *(b"k%02d" % n for n in range(24)), b"k05\x00", b"\xff\xff"]
DEEPEST = 3


def picked(random: Random, tree: Tree, slots_left: int) -> Job | None:
    """Any job that a policy may pick."""
    kind = random.randrange(6)
    if kind < 2 and slots_left:
        first = 0 if tree.wal_id is None else tree.wal_id + 1
        return WalJob(range(first, first + random.randint(1, slots_left)), "trial")
    if kind == 5:
        return merge_job(tree, SYSTEM_LEVEL, SYSTEM_LEVEL, random.randint(1, 4))
    levels = [run.level for run in tree.runs]
    source = random.choice([L0, *levels])
    below = [level for level in levels if level > source]
    target = min([random.randint(source + 1, DEEPEST), *below]) if source < DEEPEST else source
    if target == source:
        return None
    job = merge_job(tree, source, target, random.randint(1, 6))
    if job is None or job.overlapped or random.random() < 0.5:
        return job
    if source == L0 and len(job.sources) > 1:
        return job  # they may overlap each other
    return MergeJob(source, target, job.sources, (), is_move=True, reason="trial")


async def check(trial: Trial) -> None:
    """The levels say what was written to the slots up to c, now and later, and so does the order
    in which they are read.
    """
    manifest = await trial.stored.refresh()
    naive = await NaiveTree.read(trial.store, manifest)
    written = trial.compacted(manifest)
    for now_ms in (manifest.logical_time_ms, manifest.logical_time_ms + 10**6):
        assert naive.answers(KEYS, now_ms) == answers(written, KEYS, now_ms)
    assert manifest.last_compacted_seq == max((entry.seq for entry in written), default=0)
    horizon_ms = manifest.logical_time_ms - 1_000
    records = Versions(entry for entry in written if entry.kind is not Kind.RANGE_TOMBSTONE)
    for key in (record_key(b"r%d" % n) for n in range(4)):
        expected = records.newest_of(key)
        if expected is not None and expected.expire_at_ms > horizon_ms:
            assert naive.record(key) == expected


async def history(seed: int, *, subcompactions: int, sst_bytes: int) -> None:
    """Write and compact at random; look after every job."""
    random = Random(seed)
    limits = small_settings(sst_bytes=sst_bytes, subcompactions=subcompactions)
    trial = await Trial.begun(limits, seed)
    for _ in range(random.randint(4, 24)):
        for _ in range(random.randrange(4)):
            commits = [
                [
                    *{
                        entry.key: entry
                        for entry in (
                            random_entry(random, KEYS, trial.logical_time_ms)
                            for _ in range(random.randint(1, 8))
                        )
                    }.values()
                ]
                for _ in range(random.randrange(4))
            ]
            expiry_ms = trial.logical_time_ms + random.randrange(3_000)
            name = b"r%d" % random.randrange(4)
            records = [record(name, expiry_ms)] if commits and random.random() < 0.4 else []
            await trial.write(*commits, records=records, time_ms=random.choice((0, 5, 900)))
        manifest = await trial.stored.refresh()
        tree = Tree.of(manifest)
        slots_left = len(trial.written) - manifest.first_uncompacted_wal_id
        job = picked(random, tree, slots_left)
        if job is not None:
            await trial.run(job)
            await check(trial)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 3]), st.sampled_from([60, 250, 4_000]))
def test_no_compaction_changes_an_answer(seed: int, subcompactions: int, sst_bytes: int) -> None:
    """Whatever is compacted in whatever order, every key holds what was written last (I2, I9)."""
    asyncio.run(history(seed, subcompactions=subcompactions, sst_bytes=sst_bytes))


def test_a_move_is_the_same_sst_in_another_level() -> None:
    """The result of a move is told without reading or writing."""
    assert move_result(MergeJob(1, 2, (), (), is_move=True, reason="")).outputs == []
